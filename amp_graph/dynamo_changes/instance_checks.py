"""A class that says itself which tensors are its instances is asked.

    isinstance(hidden, Variable)    True of all tensors, as in scripts of PyTorch's first years

Dynamo goes by the class of a tensor alone, and answers False. Here PyTorch's own checks see the
fake tensor, and an `__instancecheck__` of somebody else's is captured as any function is. A list
that nothing has read is not read for it.

Private names of PyTorch used here:

    torch._dynamo.variables.TensorVariable, UserFunctionVariable, UserDefinedClassVariable
"""

from __future__ import annotations

from inspect import isclass
from types import FunctionType, UnionType
from typing import Any, get_args

from torch._dynamo.variables import (
    ConstantVariable,
    TensorVariable,
    UserDefinedClassVariable,
    UserFunctionVariable,
)

from amp_graph.dynamo_changes.ended_graphs import end_graph
from amp_graph.dynamo_changes.known_values import fake_of
from amp_graph.dynamo_changes.unread import class_of_list

# Where the checks are defined that Dynamo gives an answer of its own to.
KNOWN = {"abc", "typing", "typing_extensions", "torch.nn.parameter"}


def _ask(method: Any, builtin: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    classes = _classes(args[1].realize()) if len(args) == 2 else ()
    if not any(map(_own_check, classes)):
        kind = class_of_list(args[0]) if classes and all(map(isclass, classes)) else None
        if kind is not None:
            return ConstantVariable.create(issubclass(kind, classes))
        return method(builtin, frame, args, kwargs)
    value = args[0].realize()
    if not isinstance(value, TensorVariable):
        return method(builtin, frame, args, kwargs)
    for kind in classes:
        found = _is_instance(method, builtin, frame, value, kind)
        if not found.is_python_constant():
            end_graph("a check of an instance that depends on data", kind.__name__)
        if found.as_python_constant():
            return ConstantVariable.create(True)
    return ConstantVariable.create(False)


def _is_instance(method: Any, builtin: Any, frame: Any, value: Any, kind: Any) -> Any:
    check, asked = _own_check(kind), UserDefinedClassVariable(kind)
    if check is None:
        return method(builtin, frame, [value, asked], {})
    if check.__module__.startswith("torch."):  # which Dynamo passes over
        return ConstantVariable.create(isinstance(fake_of(value), kind))
    return UserFunctionVariable(check).call_function(frame, [asked, value], {})


def _classes(asked: Any) -> tuple[Any, ...]:
    if not asked.is_python_constant():
        return ()
    found = asked.as_python_constant()
    if isinstance(found, UnionType):
        return get_args(found)
    return found if isinstance(found, tuple) else (found,)


def _own_check(kind: Any) -> FunctionType | None:
    """The check that was written for classes like this one, if any."""
    check = getattr(type(kind), "__instancecheck__", None)
    return check if isinstance(check, FunctionType) and check.__module__ not in KNOWN else None


BUILTINS = {isinstance: _ask}
