"""Whether there is a list is asked without reading it.

    if self.history is not None:                    isinstance(self.history, list)
        self.history.append(loss.item())            hasattr(self, "history")

Dynamo reads the list for each of these, and guards how many items it has. The answers depend on its
class and its name alone. (`isinstance` is in `instance_checks`.)

Private names of PyTorch used here:

    torch._dynamo.variables.UserDefinedObjectVariable.call_obj_hasattr, .source, .value
    .output.side_effects.has_pending_mutation_of_attr
    torch._dynamo.source.AttrSource
"""

from __future__ import annotations

import functools
from inspect import getattr_static
from typing import Any

from torch._dynamo.source import AttrSource
from torch._dynamo.variables import ConstantVariable, UserDefinedObjectVariable

from amp_graph.dynamo_changes.own_guards import hold_key
from amp_graph.dynamo_changes.unread import LISTS, class_of_list, class_of_unread


def _compare(unlike: bool, capture: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    if any(map(_is_none, args)) and any(map(class_of_list, args)):
        return ConstantVariable.create(unlike)
    return capture(frame, args, kwargs)


def _is_none(variable: Any) -> bool:
    return class_of_unread(variable) is None and variable.is_constant_none()


def _has(method: Any, asked: Any, frame: Any, name: str) -> Any:
    is_written = frame.output.side_effects.has_pending_mutation_of_attr(asked, name)
    if asked.source is None or is_written or not holds_list(asked.value, name):
        return method(asked, frame, name)
    hold_key(AttrSource(asked.source, "__dict__"), name, True)
    return ConstantVariable.create(True)


def holds_list(owner: Any, name: str) -> bool:
    """Whether an object has a list of this name, which nothing of its class stands before."""
    held = getattr(owner, "__dict__", {}).get(name)
    return type(held) in LISTS and not hasattr(getattr_static(type(owner), name, None), "__get__")


COMPARES = {
    "is": functools.partial(_compare, False),
    "is not": functools.partial(_compare, True),
}
CHANGES = ((UserDefinedObjectVariable, "call_obj_hasattr", _has),)
