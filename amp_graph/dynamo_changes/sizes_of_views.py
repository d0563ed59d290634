"""A view has the sizes that it was asked for, where they are symbols.

    windows = x.view(batch, height // 4, 4, width // 4, 4, channels)    windows of Swin
    x = x.view(-1, height, width, channels)

PyTorch finds such a shape by splitting and joining dimensions, and a size is what that leaves over:
height // (height // 4) in place of the 4, and, in place of the batch, all elements divided by those
of the other sizes. They are the same numbers, but each view has the expressions of the view before
inside of its own, until SymPy takes seconds for a question, and a guard is long. Here a view of
contiguous memory has the sizes as they were given, and one left open (-1) is the size that the
tensor has at that place, if that is the number.

The only question left is whether the elements are as many, so that there are fewer guards, too.

Private names of PyTorch used here:

    torch._refs._reshape_view_helper              the sizes and strides of a reshaped fake tensor
    torch._prims_common.extract_shape_from_varargs, .infer_size, .is_contiguous_or_false
    torch.SymInt.node.expr                        a size as an expression of SymPy
    torch.utils._sympy.functions.FloorDiv
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import SymInt, _refs
from torch._prims_common import extract_shape_from_varargs, infer_size, is_contiguous_or_false
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols
from torch.utils._sympy.functions import FloorDiv

from amp_graph.dynamo_changes.replaced import Change
from amp_graph.graphs.fake import size_hint


def _reshape(method: Any, tensor: torch.Tensor, *shape: Any, allow_copy: bool) -> Any:
    asked = extract_shape_from_varargs(shape, validate=False)
    if not (asked and tensor.ndim and _are_symbols_of_inputs((*tensor.shape, *asked))):
        return method(tensor, *shape, allow_copy=allow_copy)
    sizes = infer_size(asked, tensor.numel())
    sizes = tuple(_given(tensor, asked, place, size) for place, size in enumerate(sizes))
    if tensor.numel() == 0 or not is_contiguous_or_false(tensor):
        return method(tensor, *sizes, allow_copy=allow_copy)
    strides = [math.prod(sizes[place + 1 :]) for place in range(len(sizes))]
    return torch.as_strided(tensor, sizes, strides)


def _are_symbols_of_inputs(sizes: Sequence[int | SymInt]) -> bool:
    """Whether there are symbols among them, and none that depends on data."""
    return any(isinstance(n, SymInt) for n in sizes) and not has_free_unbacked_symbols(sizes)


def _given(tensor: torch.Tensor, asked: Sequence[Any], place: int, size: int | SymInt) -> Any:
    """Return a size of the new shape; the tensor's at the same place, counted from the first or the
    last, for one that was left open, if it is the same number and a quotient otherwise."""
    if not (isinstance(asked[place], int) and asked[place] == -1 and _is_quotient(size)):
        return size
    places = [p for p in (place, place - len(asked)) if -tensor.ndim <= p < tensor.ndim]
    there = (tensor.shape[p] for p in places)
    return next((n for n in there if size_hint(n) == size_hint(size) and n == size), size)


def _is_quotient(size: int | SymInt) -> bool:
    return isinstance(size, SymInt) and bool(size.node.expr.has(FloorDiv))


CHANGES: tuple[Change, ...] = ((_refs, "_reshape_view_helper", _reshape),)
