"""The memory of tensors: who shares it, and whether it lives.

Private names of PyTorch used here:

    torch.UntypedStorage._cdata, _weak_ref, _expired, _free_weak_ref
    torch.Tensor._base, _view_func
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

_layout, _cdata = attrgetter("layout"), attrgetter("_cdata")
_weak_ref: Any = torch.UntypedStorage._weak_ref
_expired: Any = torch.UntypedStorage._expired
_free_weak_ref: Any = torch.UntypedStorage._free_weak_ref


def view_of(base: Tensor, like: Tensor) -> Tensor:
    """Return the view of `base` that `like` is of its own base."""
    view: Tensor = like._view_func(base)  # type: ignore[attr-defined]
    return view


def memory(tensor: Tensor) -> int:
    """Return a key that tensors have in common if they share their memory."""
    if tensor.layout is torch.strided:
        storage: int = tensor.untyped_storage()._cdata
        return storage
    return id(tensor if tensor._base is None else tensor._base)


def memories(tensors: Sequence[Tensor]) -> Iterable[int]:
    """Return the `memory` of each, in C for tensors that have such."""
    if {*map(_layout, tensors)} <= {torch.strided}:
        return map(_cdata, map(Tensor.untyped_storage, tensors))
    return map(memory, tensors)


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Return the `address` of each, in C for tensors that have one."""
    try:
        return [*map(Tensor.data_ptr, tensors)]
    except RuntimeError:
        return [*map(address, tensors)]


def address(tensor: Tensor) -> int:
    """Return where a tensor's memory begins; 0 if it has none, as in a transform of torch.func."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


class Memories:
    """The memory of some tensors, not kept alive by this.

    As `torch.multiprocessing.reductions.StorageWeakRef` does for one, without an object for each.
    """

    def __init__(self) -> None:
        self._references: list[Any] = []

    def add(self, tensors: Iterable[Tensor]) -> None:
        self._references += map(_weak_ref, map(Tensor.untyped_storage, tensors))

    def are_alive(self) -> bool:
        return not any(map(_expired, self._references))

    def __del__(self) -> None:
        any(map(_free_weak_ref, self._references))  # none returns anything
