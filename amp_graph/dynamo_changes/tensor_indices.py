"""An index that is a number in a tensor does not end a graph, and one that is a list of numbers is
not captured anew for others.

    alpha = alphas[t]                ->   alphas.select(0, t.item())
    h = hidden[:, last]              ->   hidden.select(1, last.item())
    h = hidden[[n - 1 for n in ns]]  ->   hidden[torch.tensor([n - 1 for n in ns])]

That is what PyTorch does without Dynamo: it selects by such an index before it looks at the others.
Dynamo ends the graph to ask for the number, unless it is the only index and a number already. A
write to such a place (`x[t] = 0`) ends the graph as ever. In functions that a user gives
`flex_attention` such a number stands for many (`bias[head]`), and takes as many places. Of the
numbers in a list Dynamo makes constants.

Private names of PyTorch used here:

    torch._dynamo.variables.BuiltinVariable.call_function    of `operator.getitem`
    torch._dynamo.variables.TensorVariable.method___setitem__, .ndim, ..., .dtype
    torch._dynamo.variables.ListVariable, SliceVariable, SymNodeVariable, TupleVariable    indices
    torch._dynamo.variables.TorchInGraphFunctionVariable    of `torch.tensor`
    torch._dynamo.config.capture_scalar_outputs    whether such a number may be asked for
    torch._C._functorch.is_batchedtensor    whether a value in a graph stands for many, of a vmap
    torch._dynamo._trace_wrapped_higher_order_op.TransformGetItemToIndex
                                            the mode that such functions run under
    torch.overrides._get_current_function_mode
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch._dynamo.config as dynamo_config
from torch import fx
from torch._C._functorch import is_batchedtensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._dynamo.variables import (
    BuiltinVariable,
    ConstantVariable,
    ListVariable,
    SliceVariable,
    TensorVariable,
    TorchInGraphFunctionVariable,
    TupleVariable,
)
from torch._dynamo.variables.tensor import SymNodeVariable
from torch.overrides import _get_current_function_mode

from amp_graph.dynamo_changes.known_values import fake_of
from amp_graph.graphs.aten import FLEX_ATTENTION

MASKS = (torch.bool, torch.uint8)


class _Indices(NamedTuple):
    """The indices of a tensor: those that take one element of a dimension, by dimension, and the
    others, in order."""

    numbers: dict[int, Any]
    others: list[Any]


def as_read_by(users: Iterable[fx.Node]) -> contextlib.AbstractContextManager[Any]:
    """Take indices, within, as in a function that is for these operators."""
    is_for_many = any(user.target is FLEX_ATTENTION for user in users)
    return TransformGetItemToIndex() if is_for_many else contextlib.nullcontext()


def _call_function(method: Any, builtin: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    is_index = builtin.fn is operator.getitem and len(args) == 2
    if is_index and isinstance(args[0].realize(), TensorVariable):
        args = [args[0], _with_tensors(frame, args[1].realize())]
    if is_index and dynamo_config.capture_scalar_outputs and not _is_for_many():
        part, key = args
        found = _indices(part.realize(), key.realize())
        if found is not None:
            for dimension, number in sorted(found.numbers.items(), reverse=True):
                where = [ConstantVariable.create(dimension), _number(frame, number)]
                part = part.call_method(frame, "select", where, {})
            if not found.others:
                return part
            args = [part, TupleVariable(found.others)]
    return method(builtin, frame, args, kwargs)


def _set(method: Any, tensor: Any, frame: Any, key: Any, value: Any) -> Any:
    return method(tensor, frame, _with_tensors(frame, key.realize()), value)


def _with_tensors(frame: Any, key: Any) -> Any:
    """Return the key of a tensor with a tensor in the place of each list of numbers that change."""
    if isinstance(key, TupleVariable):
        keys = [k.realize() for k in key.items]
        if not any(map(_changes, keys)):
            return key
        return TupleVariable([_with_tensors(frame, k) for k in keys])
    if not _changes(key):
        return key
    return TorchInGraphFunctionVariable(torch.tensor).call_function(frame, [key], {})


def _changes(key: Any) -> bool:
    """Whether a key is a list of whole numbers, some of which change."""
    if not isinstance(key, ListVariable):
        return False
    numbers = [item.realize() for item in key.items]
    if {number.python_type() for number in numbers} != {int}:
        return False
    return not all(number.is_python_constant() for number in numbers)


def _is_for_many() -> bool:
    return isinstance(_get_current_function_mode(), TransformGetItemToIndex)


def _number(frame: Any, index: Any) -> Any:
    is_one = isinstance(index, SymNodeVariable)
    return index if is_one else index.call_method(frame, "item", [], {})


def _indices(tensor: Any, key: Any) -> _Indices | None:
    """Sort the indices of a tensor. None if no index is a number in a tensor, or if it is not known
    which dimension each index is for."""
    if type(tensor) is not TensorVariable or not isinstance(tensor.ndim, int):
        return None
    keys = [k.realize() for k in key.items] if isinstance(key, TupleVariable) else [key]
    sizes = [_dimensions(k) for k in keys]
    if None in sizes or not any(map(_is_number, keys)):
        return None
    return _placed(keys, sizes, tensor.ndim)


def _placed(keys: Sequence[Any], sizes: Sequence[Any], ndim: int) -> _Indices:
    rest = ndim - sum(size for size in sizes if size is not ...)
    dimension, found = 0, _Indices({}, [])
    for key, size in zip(keys, sizes, strict=True):
        if _is_number(key):
            found.numbers[dimension] = key
        else:
            found.others.append(key)
        dimension += rest if size is ... else size
    return found


def _is_number(index: Any) -> bool:
    """Whether an index is a number in a tensor, or a size that depends on data."""
    if isinstance(index, SymNodeVariable):
        return index.python_type() is int
    if type(index) is not TensorVariable or index.ndim != 0:
        return False
    is_many = is_batchedtensor(fake_of(index))
    return not is_many and not index.dtype.is_floating_point and index.dtype not in MASKS


def _dimensions(index: Any) -> Any:
    """Return how many dimensions an index is for, `...` for all that are left; None if that is not
    known."""
    if isinstance(index, SliceVariable) or _is_number(index):
        return 1
    if type(index) is TensorVariable and index.dtype is not None:
        return index.ndim if index.dtype in MASKS else 1
    if not index.is_python_constant():
        return None
    value = index.as_python_constant()
    if isinstance(value, list):
        return 1 if {*map(type, value)} == {int} else None
    return {type(None): 0, int: 1, type(...): ...}.get(type(value))


CHANGES = (
    (BuiltinVariable, "call_function", _call_function),
    (TensorVariable, "method___setitem__", _set),
)
