"""Tensors inside of the transforms of torch.func, and of the older vmap.

Private names of PyTorch used here:

    torch._C._are_functorch_transforms_active
    torch._C._functorch.is_batchedtensor, is_legacy_batchedtensor, get_unwrapped
    torch._remove_batch_dim, _add_batch_dim
    torch.autograd.Function, that its base class has `apply` too
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

_layout = attrgetter("layout")
are_active: Any = torch._C._are_functorch_transforms_active
_is_batched = torch._C._functorch.is_batchedtensor
_is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor


def applied(function: type[Function], *args: Any) -> Any:
    """Return what `function.apply` returns, sooner: outside of transforms of torch.func no argument
    need be looked at for what one left behind."""
    if are_active():
        return function.apply(*args)
    return super(Function, function).apply(*args)  # type: ignore[misc]


def unbatched(tensor: Tensor) -> Tensor:
    """Return all of the batch that a tensor inside of torch.vmap, or of the older vmap,
    stands for."""
    while _is_batched(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return _without_levels(tensor)[0]


def for_all(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Apply a function to each element of a tensor.

    For tensors of the older vmap, that of `torch.autograd.grad(is_grads_batched=True)`, it gets the
    whole batch: an autograd.Function applied to one element is recorded for what stands for the
    batch, and forgotten with it.
    """
    whole, levels = _without_levels(tensor)
    result = function(whole)
    for level in range(1, levels + 1):
        result = torch._add_batch_dim(result, levels - level, level)
    return result


def _without_levels(tensor: Tensor) -> tuple[Tensor, int]:
    """Return all of a batch of the older vmap, and the number of its levels, which count from 1:
    the last is the first dimension. A level that the tensor does not have is a dimension of 1."""
    level = 0
    while _is_legacy_batched(tensor):
        level += 1
        tensor = torch._remove_batch_dim(tensor, level, 1, 0)
    return tensor, level


def are_plain(gradients: Sequence[Tensor]) -> bool:
    """Whether fused calls take these gradients: they are dense, none is batched, and none is of a
    subclass, which may know no such calls (DTensor)."""
    return (
        {*map(type, gradients)} <= {Tensor}
        and {*map(_layout, gradients)} <= {torch.strided}
        and not (are_active() and any(map(_is_batched, gradients)))
        and not any(map(_is_legacy_batched, gradients))
    )
