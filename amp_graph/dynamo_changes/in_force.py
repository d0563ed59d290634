"""All that Dynamo does otherwise while it captures for us.

The files of this folder say what to change, in tables:

    CALLS      how the call of a function is captured, by function of PyTorch or of `math`
    AROUND     what is done around each such call, whatever it is of
    BUILTINS   the same, by function of Python's
    COMPARES   the same, by comparison: "==", "is not"
    FINDS      what the call of a function returns, by module and name (`known_calls`)
    ENTRIES    what is in tables of Dynamo's
    CHANGES    what its methods do
    CONTEXTS   context managers around the capture of a frame, for what needs more

A PyTorch that is newer than `NEWEST` may lack private names of some files, which are left out then,
with a warning: each is of use by itself.

Private names of PyTorch used here:

    torch._dynamo.variables.TorchInGraphFunctionVariable    a function that becomes an operator
    torch._dynamo.variables.BuiltinVariable.fn              a function of Python's
    torch._dynamo.variables.builtin.GetAttrBuiltinVariable._fn, SetAttrBuiltinVariable
                                                            the same, in 2.13
    torch._dynamo.symbolic_convert.compare_op_handlers      how comparisons are captured
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._dynamo import symbolic_convert
from torch._dynamo.variables import BuiltinVariable, TorchInGraphFunctionVariable, builtin

from amp_graph.dynamo_changes.known_calls import by_name
from amp_graph.dynamo_changes.replaced import (
    Change,
    Entries,
    by_function,
    those_of,
    with_entries,
)
from amp_graph.errors import warn
from amp_graph.patching import method_inside

NEWEST = "2.15"  # with which all of this was seen to work
IS_KNOWN = torch.__version__ < "2.16.dev0"
# What functions of Python's are to Dynamo that are not among its `BuiltinVariable`.
OF_THEIR_OWN = ("GetAttrBuiltinVariable", "SetAttrBuiltinVariable")
TABLES = ("ENTRIES", "CHANGES", "CONTEXTS")
Context = Callable[[], contextlib.AbstractContextManager[None]]


def _parts() -> Iterator[ModuleType]:
    """Return the files of this folder; of a newer PyTorch than `NEWEST` those that still fit."""
    for each in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if (name := f"{__package__}.{each.name}") == __name__:
            continue
        try:
            part = importlib.import_module(name)
            if not IS_KNOWN:
                with _in_force(*[getattr(part, table, ()) for table in TABLES]):
                    pass
        except (ImportError, AttributeError):  # a private name that there is no more
            if IS_KNOWN:
                raise
            left_out.append(each.name)
        else:
            yield part


@contextlib.contextmanager
def _in_force(
    entries: Iterable[Entries], changes: Iterable[Change], contexts: Iterable[Context]
) -> Iterator[None]:
    with contextlib.ExitStack() as inside:
        for table, own in entries:
            inside.enter_context(with_entries(table(), own))
        for kind, name, around in changes:
            inside.enter_context(method_inside(kind, name, around))
        for context in contexts:
            inside.enter_context(context())
        yield


left_out: list[str] = []
PARTS = (*_parts(),)
if left_out:
    warn(
        f"torch {torch.__version__} is newer than {NEWEST}, the newest that amp_graph was tried "
        f"with, and {len(left_out)} of its changes to how Dynamo captures do not fit "
        f"({', '.join(left_out)}): models may be captured in more graphs. Look for a newer "
        f"amp_graph"
    )


def _all(table: str) -> Iterator[Any]:
    """Return the entries of this table in all parts that have it."""
    return (entry for part in PARTS for entry in getattr(part, table, ()))


def _joined(table: str) -> dict[Any, Any]:
    """Join tables of this name, which have no key in common."""
    tables = [getattr(part, table, {}) for part in PARTS]
    found = {key: value for each in tables for key, value in each.items()}
    assert len(found) == sum(map(len, tables))
    return found


def _compared() -> dict[str, Callable[..., Any]]:
    """Return how comparisons are captured: in all parts that change one, each around the others."""
    captures = dict(COMPARISONS)
    for part in PARTS:
        for name, around in getattr(part, "COMPARES", {}).items():
            if name in captures:  # a newer PyTorch may lack it
                captures[name] = functools.partial(around, captures[name])
    return {name: capture for name, capture in captures.items() if capture != COMPARISONS[name]}


COMPARISONS: dict[str, Any] = getattr(symbolic_convert, "compare_op_handlers", {})
CALLS, BUILTINS, FINDS = _joined("CALLS"), _joined("BUILTINS"), _joined("FINDS")
ENTRIES: tuple[Entries, ...] = (*_all("ENTRIES"), (lambda: COMPARISONS, _compared()))
CHANGES: tuple[Change, ...] = (  # in any order: of one method, no two are about the same call
    by_function(TorchInGraphFunctionVariable, CALLS, around=[*_all("AROUND")]),
    by_function(BuiltinVariable, BUILTINS, held_as="fn"),
    *(by_function(kind, BUILTINS, held_as="_fn") for kind in those_of(builtin, OF_THEIR_OWN)),
    by_name(FINDS),
    *_all("CHANGES"),
)
CONTEXTS: tuple[Context, ...] = (*_all("CONTEXTS"),)


def changes_in_force() -> contextlib.AbstractContextManager[None]:
    """Within, all of these are made. They are the process's: one thread at a time."""
    return _in_force(ENTRIES, CHANGES, CONTEXTS)
