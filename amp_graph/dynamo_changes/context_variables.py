"""To ask for the value of a context variable does not end a graph.

    if _MERGING_DISABLED.get():    sentence-transformers, in each call of a loss

A guard says that the value is this one, if it is None, a boolean or a string. A number, such as the
step of a schedule, may be another one in each call, and ends the graph as ever.

Private names of PyTorch used here, before 2.14:

    torch._dynamo.variables.UserDefinedObjectVariable.call_method
    torch._dynamo.source.ContextVarGetSource    Dynamo's own way, since then
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import Any

from torch._dynamo import source
from torch._dynamo.variables import ConstantVariable, UserDefinedObjectVariable

from amp_graph.dynamo_changes.own_guards import hold_while
from amp_graph.dynamo_changes.replaced import Change

KINDS = (bool, str)
IS_DYNAMOS = hasattr(source, "ContextVarGetSource")


def _call_method(method: Any, variable: Any, frame: Any, name: str, args: Any, kwargs: Any) -> Any:
    asked = variable.value
    if type(asked) is ContextVar and name == "get" and variable.source and not (args or kwargs):
        with contextlib.suppress(LookupError):
            value = asked.get()
            if value is None or type(value) in KINDS:
                hold_while(_has, variable.source, f"its value is {value!r}", value)
                return ConstantVariable.create(value)
    return method(variable, frame, name, args, kwargs)


def _has(value: Any, variable: ContextVar[Any]) -> bool:
    try:
        found = variable.get()
    except LookupError:
        return False
    return type(found) is type(value) and bool(found == value)


CHANGES: tuple[Change, ...] = ((UserDefinedObjectVariable, "call_method", _call_method),)
if IS_DYNAMOS:
    CHANGES = ()
