"""Gradients that share one piece of memory, so that one call can work on all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def empty_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Uninitialised tensors with the shapes, strides, dtype and device of these, in one piece of
    memory if they are contiguous and alike."""
    first = tensors[0]
    if not all(t.is_contiguous() and t.device == first.device for t in tensors):
        return [torch.empty_like(t, requires_grad=False) for t in tensors]
    sizes = [t.numel() for t in tensors]
    memory = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
    parts = memory.split(sizes)
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def merged(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The same numbers in fewer tensors: those that fill a piece of memory become one, flat."""
    sharing: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        sharing.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    result = []
    for group in sharing.values():
        first, numel = group[0], sum(t.numel() for t in group)
        fills = len(group) > 1 and numel * first.itemsize == first.untyped_storage().nbytes()
        if fills and len({t.data_ptr() for t in group}) == len(group):
            result.append(first.as_strided((numel,), (1,), 0))
        else:
            result += group
    return result
