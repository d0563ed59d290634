"""To ask for the value of a context variable does not end a graph.

    if _MERGING_DISABLED.get():    sentence-transformers, in each call of a loss

What is captured holds for this value, if it is a constant such as True.

Private names of PyTorch used here; seen to work on 2.11 and 2.13, later ones do without:

    torch._dynamo.variables.UserDefinedObjectVariable.call_method
    torch._dynamo.guards.install_guard, GuardBuilder.get_guard_manager, get_verbose_code_parts
    torch._dynamo.source.ContextVarGetSource    Dynamo's own way, since 2.14
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch._dynamo import guards, source
from torch._dynamo.variables import ConstantVariable, UserDefinedObjectVariable

from amp_graph.capture.replaced import method_inside

IS_DYNAMOS = hasattr(source, "ContextVarGetSource")


def context_variables_known() -> contextlib.AbstractContextManager[None]:
    """Within, Dynamo goes on with the value."""
    if IS_DYNAMOS:
        return contextlib.nullcontext()
    return method_inside(UserDefinedObjectVariable, "call_method", _call_method)


def _call_method(method: Any, variable: Any, frame: Any, name: str, args: Any, kwargs: Any) -> Any:
    asked = variable.value
    if type(asked) is ContextVar and name == "get" and variable.source and not (args or kwargs):
        with contextlib.suppress(LookupError):
            value = asked.get()
            if ConstantVariable.is_literal(value):
                guards.install_guard(variable.source.make_guard(partial(_guard, value)))
                return ConstantVariable.create(value)
    return method(variable, frame, name, args, kwargs)


def _guard(value: Any, builder: Any, guard: Any) -> None:
    """That the variable has this value."""

    def holds(variable: ContextVar[Any]) -> bool:
        try:
            found = variable.get()
        except LookupError:
            return False
        return type(found) is type(value) and bool(found == value)

    said = guards.get_verbose_code_parts(f"{guard.name}.get() == {value!r}", guard)
    builder.get_guard_manager(guard).add_lambda_guard(holds, said, guard.user_stack)
