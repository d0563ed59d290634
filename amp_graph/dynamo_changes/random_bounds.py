"""Bounds of random numbers that change from call to call are applied to numbers without bounds.

    x.uniform_(low, high)    ->    x.uniform_().mul_(high - low).add_(low)
    x.normal_(mean, std)     ->    x.normal_().mul_(std).add_(mean)

A bound may be a number that has changed, the scale of noise that fades, say, or a tensor made of
such numbers, as in NEFTune:

    magnitude = alpha / torch.sqrt(torch.tensor(x.size(1) * x.size(2)))
    x + torch.zeros_like(x).uniform_(-magnitude, magnitude)

Dynamo would capture each number anew, and end the graph at such a tensor (2.11 to 2.15). PyTorch
applies bounds in the same way, so that as many random numbers are drawn, and are the same up to
rounding.

Private names of PyTorch used here:

    torch._dynamo.variables.TensorVariable.call_method, .as_proxy, .dtype    a value of the graph
    torch._dynamo.variables.tensor.SymNodeVariable.sym_num                   a number that changes
    torch._dynamo.variables.UserFunctionVariable.call_function               a function to capture
    torch._subclasses.fake_tensor.FakeTensor.constant                        a tensor that is known
    torch._refs.tensor                     what Dynamo makes of `torch.tensor` of changing numbers
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.variables import ConstantVariable, TensorVariable, UserFunctionVariable
from torch._dynamo.variables.tensor import SymNodeVariable

from amp_graph.dynamo_changes.replaced import Change
from amp_graph.graphs.writes import is_as_made

DTYPES = (torch.float32, torch.float64)  # of which PyTorch rounds no more often
NUMBERS = (int, float)
MAKING = (torch.tensor, torch._refs.tensor, torch.scalar_tensor)


def _uniform(x: Any, low: Any, high: Any) -> Any:
    return _moved(x.uniform_(), _as_in(x, high) - _as_in(x, low), _as_in(x, low))


def _normal(x: Any, mean: Any, std: Any) -> Any:
    return _moved(x.normal_(), _as_in(x, std), _as_in(x, mean))


def _as_in(x: Any, bound: Any) -> Any:
    return bound.to(x.dtype) if isinstance(bound, Tensor) else bound


def _moved(x: Any, scale: Any, by: Any) -> Any:
    x.mul_(scale)
    return x.add_(by) if isinstance(by, Tensor) or by != 0 else x


# By method: what stands in for it, its bounds, and what those are if they are not given.
METHODS: dict[str, tuple[Any, dict[str, float]]] = {
    "uniform_": (_uniform, {"from": 0.0, "to": 1.0}),
    "normal_": (_normal, {"mean": 0.0, "std": 1.0}),
}


def _call_method(method: Any, tensor: Any, frame: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name in METHODS and type(tensor) is TensorVariable and tensor.dtype in DTYPES:
        stand_in, usual = METHODS[name]
        given = dict(zip(usual, args, strict=False)) | kwargs
        if len(args) <= len(usual) and given.keys() <= usual.keys():  # and no generator
            known = {key: ConstantVariable.create(value) for key, value in usual.items()}
            bounds = [bound.realize() for bound in (known | given).values()]
            if _may_be_applied(tensor, name, *bounds):
                return UserFunctionVariable(stand_in).call_function(frame, [tensor, *bounds], {})
    return method(tensor, frame, name, args, kwargs)


def _may_be_applied(tensor: Any, name: str, *bounds: Any) -> bool:
    """Whether one of the bounds changes, and both are right. Questions to a symbol become guards;
    wrong ones are left to PyTorch, which raises."""
    if not all(_is_number(b) or _is_made_of_numbers(tensor, b) for b in bounds):
        return False
    if all(b.is_python_constant() or _is_known(b) for b in bounds):
        return False
    first, second = map(_number, bounds)
    least = 0.0 if name == "normal_" else first
    return least is None or second is None or bool(least <= second)


def _is_number(bound: Any) -> bool:
    is_one = isinstance(bound, SymNodeVariable) or bound.is_python_constant()
    return is_one and bound.python_type() in NUMBERS


def _number(bound: Any) -> Any:
    """Return a number, or its symbol, or None for a tensor."""
    if isinstance(bound, SymNodeVariable):
        return bound.sym_num
    return bound.as_python_constant() if bound.is_python_constant() else None


def _is_known(bound: Any) -> bool:
    """Whether a tensor is made of numbers that do not change: Dynamo knows its value."""
    if not isinstance(bound, TensorVariable):
        return False
    return getattr(_value(bound.as_proxy().node), "constant", None) is not None


def _is_made_of_numbers(tensor: Any, bound: Any) -> bool:
    """Whether a bound is a tensor of one number, made in the graph of Python's numbers alone."""
    if type(bound) is not TensorVariable or bound.ndim != 0 or bound.dtype.is_complex:
        return False
    is_near = bound.device.type == "cpu" or bound.device == tensor.device
    return is_near and _is_of_numbers(bound.as_proxy().node)


def _is_of_numbers(node: fx.Node) -> bool:
    if not isinstance(_value(node), Tensor):
        return True
    used = [n for n in node.all_input_nodes if isinstance(_value(n), Tensor)]
    is_made = bool(used) or node.target in MAKING
    return is_made and is_as_made(node) and all(map(_is_of_numbers, used))


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


CHANGES: tuple[Change, ...] = ((TensorVariable, "call_method", _call_method),)
