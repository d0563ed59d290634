"""A question about a value that Dynamo could answer, and does not, does not end a graph.

    if type(w).__module__.startswith("torchao."):    what a class is called: so PEFT asks in DoRA
    x.mean(axes)                                     a list of a subclass: such are those of Keras
    if torch.jit.isinstance(skip, torch.Tensor):     as networks ask that can be scripted (MONAI)
    if "indexing" in torch.meshgrid.__kwdefaults__:  what a function takes: it asks that as well
    axes = torch.arange(2, x.ndim).tolist()          numbers counted up: its losses name axes so
    if torch.rand([]) < self.layerdrop:              which is 0.0: so transformers drops layers

Private names of PyTorch used here:

    torch._dynamo.variables.misc.GetAttrVariable    an attribute that Dynamo has not looked up
    torch._dynamo.variables.user_defined.UserDefinedListVariable._base_vt
                    its items; _list_vt on 2.11, itself since 2.15
    torch._dynamo.variables.SkipFunctionVariable    a function that Dynamo passes over
    torch._dynamo.variables.VariableTracker.sq_contains
                            `in`; sq_contains_impl since 2.14, on 2.11 asked of the value
    torch._dynamo.variables.TensorVariable, ListVariable, base.ValueMutationNew
                            a value of the graph; a new list
    torch._dynamo.variables.BuiltinVariable         a function of Python's
    torch._dynamo.symbolic_convert.InstructionTranslatorBase.next_instruction
                            what is done with what a comparison says
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch._dynamo.variables import (
    BuiltinVariable,
    ConstantVariable,
    ListVariable,
    SkipFunctionVariable,
    TensorVariable,
)
from torch._dynamo.variables.base import ValueMutationNew
from torch._dynamo.variables.misc import GetAttrVariable
from torch._dynamo.variables.user_defined import UserDefinedListVariable

from amp_graph.dynamo_changes.replaced import Change, existing

CONTAINERS = (list, tuple, dict)  # TorchScript has them asked for with what they hold, or raises


def constants(args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]] | None:
    """The arguments of a call, if all are known while it is captured."""
    if not all(value.is_python_constant() for value in (*args, *kwargs.values())):
        return None
    named = {name: value.as_python_constant() for name, value in kwargs.items()}
    return [value.as_python_constant() for value in args], named


def _call_method(method: Any, attribute: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method of an attribute that is a string."""
    if attribute.is_python_constant() and isinstance(attribute.as_python_constant(), str):
        return ConstantVariable.create(attribute.as_python_constant()).call_method(*args, **kwargs)
    return method(attribute, *args, **kwargs)


def _contains(method: Any, attribute: Any, frame: Any, item: Any) -> Any:
    if attribute.is_python_constant() and item.is_python_constant():
        value = attribute.as_python_constant()
        if isinstance(value, Collection):
            return ConstantVariable.create(item.as_python_constant() in value)
    return method(attribute, frame, item)


def _tensor_method(
    method: Any, tensor: Any, frame: Any, name: str, *args: Any, **kwargs: Any
) -> Any:
    if name == "tolist" and _is_ramp(tensor.as_proxy().node):
        numbers = map(ConstantVariable.create, range(*tensor.as_proxy().node.args))
        return ListVariable([*numbers], mutation_type=ValueMutationNew())
    return method(tensor, frame, name, *args, **kwargs)


def _is_ramp(node: fx.Node) -> bool:
    """Whether it counts up from one known integer to another, and nobody took part of it yet, who
    may have written there."""
    is_known = node.target is torch.arange and all(type(n) is int for n in node.args)
    return is_known and not node.users and node.kwargs.keys() <= {"device"}


def _is_less(capture: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    """Known if it is a random number and 0 or 1, on which the model branches: else it might be
    wanted as a tensor."""
    value, limit = args
    if frame.next_instruction.opname.startswith("POP_JUMP") and limit.is_python_constant():
        number = limit.as_python_constant()
        if isinstance(number, int | float) and not 0 < number < 1 and _is_random(value.realize()):
            return ConstantVariable.create(number >= 1)
    return capture(frame, args, kwargs)


def fake_of(value: Any) -> Any:
    """Return the fake tensor of a value of the graph: one, whatever was written to the value."""
    return value.as_proxy().node.meta["example_value"]


def _is_random(value: Any) -> bool:
    """Whether it is one number, drawn from [0, 1), and nobody took part of it yet, who may have
    written there."""
    if not isinstance(value, TensorVariable):
        return False
    node = value.as_proxy().node
    is_one = fake_of(value).numel() == 1  # Python asks no others for their truth
    return node.target is torch.rand and not node.users and is_one


def _as_proxy(method: Any, variable: Any) -> Any:
    """The plain list, for an operator."""
    own = vars(variable)
    items = own.get("_base_vt") or own.get("_list_vt") or variable
    return [item.as_proxy() for item in items.items]


def _call_function(method: Any, function: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    if function.value is torch.jit.isinstance and not kwargs and _asks_for_classes(args):
        return BuiltinVariable(isinstance).call_function(frame, args, kwargs)
    return method(function, frame, args, kwargs)


def _asks_for_classes(args: Any) -> bool:
    """Not for what a container holds, such as `list[Tensor]`."""
    if len(args) != 2 or not args[1].is_python_constant():
        return False
    asked = args[1].as_python_constant()
    classes = asked if isinstance(asked, tuple) else (asked,)
    return all(isinstance(kind, type) and kind not in CONTAINERS for kind in classes)


COMPARES = {"<": _is_less}
CHANGES: tuple[Change, ...] = (
    (GetAttrVariable, "call_method", _call_method),
    *existing(
        (GetAttrVariable, "sq_contains", _contains),
        (GetAttrVariable, "sq_contains_impl", _contains),
    ),
    (UserDefinedListVariable, "as_proxy", _as_proxy),
    (SkipFunctionVariable, "call_function", _call_function),
    (TensorVariable, "call_method", _tensor_method),
)
