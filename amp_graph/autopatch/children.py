"""Processes that a script starts by multiprocessing.

Nobody is told of one when it starts, so `BaseProcess.start`, which is public, is patched.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess


@contextlib.contextmanager
def children_heard(hear: Callable[[], None]) -> Iterator[None]:
    """In here `hear` is called when a process has started that reports by itself: no daemon."""
    original = BaseProcess.start

    @functools.wraps(original)
    def start(self: BaseProcess) -> None:
        original(self)
        if not self.daemon:
            hear()

    BaseProcess.start = start  # type: ignore[method-assign]
    try:
        yield
    finally:
        if BaseProcess.start is start:
            BaseProcess.start = original  # type: ignore[method-assign]
