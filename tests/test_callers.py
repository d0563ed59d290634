"""Whose code a file is, and the first frame of the user's."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
from collections.abc import Iterator

import networkx
import torch

from amp_graph import callers, errors
from amp_graph.callers import calling, depth_of_user, is_ours, is_users, place


class Copied:
    def __deepcopy__(self, memo: object) -> int:
        return depth_of_user(sys._getframe(1))


def test_files_are_ours_pytorchs_pythons_or_the_users() -> None:
    assert is_ours(callers.__file__) and not is_ours(torch.__file__) and not is_ours(__file__)
    assert not any(map(is_users, (errors.__file__, torch.__file__, contextlib.__file__)))
    assert all(map(is_users, (__file__, networkx.__file__, "<stdin>", "/tmp/amp_graph/train.py")))


def test_a_frame_is_followed_by_those_that_it_was_called_from() -> None:
    here, above, *_ = calling(sys._getframe())
    assert here is sys._getframe() and above is here.f_back and not [*calling(None)]


def test_python_between_does_not_hide_the_user() -> None:
    """Such as a context manager that decorates a function, and what copies."""

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        yield

    @around()
    def decorated() -> int:
        return depth_of_user(sys._getframe(1))

    assert decorated() == 1
    assert copy.deepcopy(Copied()) == 1


def test_without_a_frame_of_the_user_it_is_the_outermost() -> None:
    found: list[str] = []
    names = {"found": found, "line": errors.line_of_user}
    code = compile("lambda: found.append(line())", callers.__file__, "eval")
    thread = threading.Thread(target=eval(code, names))
    thread.start()
    thread.join()
    assert found[0].startswith("threading.py:")


def test_places_have_the_name_of_the_file_alone() -> None:
    assert place("/home/me/net.py", 12) == "net.py:12"
