"""A new tensor that is filled with a number in a tensor does not end a graph, and has its type.

    torch.full((n,), count)       ->    torch.full((n,), count, dtype=torch.int64)
    torch.full_like(x, stride)    ->    torch.empty_like(x).fill_(stride)
    x.new_full((n, 1), stride)    ->    x.new_empty((n, 1)).fill_(stride)

So detectors do with the strides of their levels. PyTorch takes the number out of the tensor, and
what it fills is of the number's type. Dynamo ends the graph at the last two, deep inside of a
model, and makes float32 of the first, whatever the number is (2.13).

Private names of PyTorch used here:

    torch._dynamo.variables.TorchInGraphFunctionVariable.call_function
    torch._dynamo.variables.TensorVariable.call_method, .ndim, .dtype, .requires_grad
    torch._dynamo.variables.ConstantVariable
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.variables import (
    ConstantVariable,
    TensorVariable,
    TorchInGraphFunctionVariable,
)

from amp_graph.dynamo_changes.replaced import Change

NOT_ALONE = {"fill_value", "size", "out", "requires_grad"}


def _full(method: Any, function: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    if _is_filled(args, kwargs) and "dtype" not in kwargs:
        number = torch.zeros((), dtype=args[1].realize().dtype).item()
        kwargs = {**kwargs, "dtype": ConstantVariable.create(torch.full((), number).dtype)}
    return method(function, frame, args, kwargs)


def _full_like(method: Any, function: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    if not _is_filled(args, kwargs):
        return method(function, frame, args, kwargs)
    empty = TorchInGraphFunctionVariable(torch.empty_like)
    made = empty.call_function(frame, [args[0]], kwargs)
    return made.call_method(frame, "fill_", [args[1].realize()], {})


def _call_method(
    method: Any, tensor: Any, frame: Any, name: Any, args: Any, kwargs: Any, *more: Any
) -> Any:
    if name != "new_full" or not _is_filled(args, kwargs):
        return method(tensor, frame, name, args, kwargs, *more)
    made = tensor.call_method(frame, "new_empty", [args[0]], kwargs)
    return made.call_method(frame, "fill_", [args[1].realize()], {})


def _is_filled(args: Any, kwargs: Any) -> bool:
    """Whether a new tensor is filled with a number in a tensor. PyTorch takes none that requires a
    gradient."""
    if len(args) != 2 or not NOT_ALONE.isdisjoint(kwargs):
        return False
    number = args[1].realize()
    return type(number) is TensorVariable and number.ndim == 0 and not number.requires_grad


CALLS = {torch.full: _full, torch.full_like: _full_like}
CHANGES: tuple[Change, ...] = ((TensorVariable, "call_method", _call_method),)
