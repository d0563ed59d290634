"""Changes of PyTorch's methods, and entries of its tables, for a while.

Private names of PyTorch used here:

    VariableBuilder.install_guards, .source    of Dynamo, for what a model uses
    VariableTracker.call_function, .value      a function, and to capture a call of it
    VariableTracker.var_getattr                `LOOK_UP`: to get an attribute of an object, which is
                                               .tp_getattro_impl since 2.14
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch._dynamo.guards import GuardBuilder

# A class or module, the name of a method or function of it, and its replacement, which is given the
# original and then the arguments.
Change = tuple[Any, str, Callable[..., Any]]
# A function that returns a table, and entries to put into it, perhaps in place of its own.
Entries = tuple[Callable[[], dict[Any, Any]], Mapping[Any, Any]]

LOOK_UP = "var_getattr" if torch.__version__ < "2.14" else "tp_getattro_impl"


def existing(*changes: Change) -> tuple[Change, ...]:
    """Return the changes whose method this version of PyTorch has."""
    return tuple((kind, name, around) for kind, name, around in changes if hasattr(kind, name))


def by_function(
    kind: type,
    calls: Mapping[Any, Callable[..., Any]],
    held_as: str = "value",
    around: Iterable[Callable[..., Any]] = (),
) -> Change:
    """Return a change by which Dynamo captures calls of some functions, known to it as variables of
    this kind, which hold the function as an attribute, through `calls`:
    `call(method, variable, frame, args, kwargs)` by function. `around` that, calls of all of them
    go through these, in the same way."""

    def call_function(method: Any, variable: Any, *called: Any) -> Any:
        call = calls.get(getattr(variable, held_as))
        if call is not None:
            method = functools.partial(call, method)
        for outer in around:
            method = functools.partial(outer, method)
        return method(variable, *called)

    return kind, "call_function", call_function


def those_of(place: ModuleType, names: Iterable[str]) -> list[Any]:
    """Return the objects of these names in a module of PyTorch's; deprecated ones may be
    missing."""
    return [getattr(place, name) for name in names if hasattr(place, name)]


@contextlib.contextmanager
def with_entries(table: dict[Any, Any], own: Mapping[Any, Any]) -> Iterator[None]:
    """Put entries into a table, within, in place of its own. Other threads that look up entries of
    its own find something at all times."""
    before = {key: table[key] for key in own if key in table}
    table.update(own)
    try:
        yield
    finally:
        table.update(before)
        for key in own.keys() - before.keys():
            del table[key]


def found_as(kind: Callable[..., Any], *own: Any) -> Callable[[Any, Any], Any]:
    """Return an entry for Dynamo's tables of objects that a model uses: such a variable is made of
    the object and `own`, for as long as it is that object."""

    def find(builder: Any, value: Any) -> Any:
        builder.install_guards(GuardBuilder.ID_MATCH)
        return kind(value, *own, source=builder.source)

    return find
