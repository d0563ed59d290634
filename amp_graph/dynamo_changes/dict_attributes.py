"""A dictionary whose items are its attributes by a method of its own class.

    class Config(dict):
        __getattr__ = dict.get              or dict.__getitem__

Dynamo ends the graph where an object has a `__getattr__` that is no Python function. Here it is
one, which calls that method.

Private names of PyTorch used here:

    torch._dynamo.variables.UserDefinedObjectVariable._check_for_getattr, .value
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.variables import UserDefinedObjectVariable

from amp_graph.dynamo_changes.replaced import Change


def _item(held: Any, name: str) -> Any:
    return dict.__getitem__(held, name)


def _item_or_none(held: Any, name: str) -> Any:
    return dict.get(held, name)


IN_PYTHON = {dict.__getitem__: _item, dict.get: _item_or_none}


def _find(method: Any, variable: Any) -> Any:
    found = method(variable)
    if not isinstance(variable.value, dict):
        return found
    return next((ours for theirs, ours in IN_PYTHON.items() if found is theirs), found)


CHANGES: tuple[Change, ...] = ((UserDefinedObjectVariable, "_check_for_getattr", _find),)
