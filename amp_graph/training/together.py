"""Gradients that share a piece of memory: one call works on all of them, and one flag tells whether
they are finite."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by number of dimensions


def empty_together(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Tensor | None]:
    """Uninitialised tensors with the shapes, strides, dtype and device of these, and the piece of
    memory, flat, that they fill; None if these are not all dense and each got its own."""
    first = tensors[0]
    if not all(_is_dense(t) and t.device == first.device for t in tensors):
        return [torch.empty_like(t, requires_grad=False) for t in tensors], None
    offsets = list(itertools.accumulate((t.numel() for t in tensors), initial=0))
    memory = torch.empty(offsets.pop(), dtype=first.dtype, device=first.device)
    parts = zip(tensors, offsets, strict=True)
    return [memory.as_strided(t.shape, t.stride(), offset) for t, offset in parts], memory


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


class CheckedGradients:
    """The gradients that were checked for infinities and NaN when they were made.

    One is known again by its address, while its memory is alive, and by its version. What was
    accumulated, replaced by a hook, or written to since is not known. A write that leaves the
    version alone is not seen: through `.grad.data`, as with GradScaler after `unscale_`, or by a
    collective (`torch.distributed.all_reduce`, torch 2.13), so one of several processes must not
    ask. Holds on to no gradient.
    """

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []

    def unscale_(self, gradients: Sequence[Tensor], memory: Tensor | None, inverse: Tensor) -> None:
        """Multiply fresh gradients, which fill a piece of memory, by 1/S, and check them."""
        found_inf = torch.zeros((), device=inverse.device)
        flat = list(gradients) if memory is None else [memory]
        torch._amp_foreach_non_finite_check_and_unscale_(flat, found_inf, inverse)
        alive = [piece for piece in self._pieces if not piece.storage.expired()]
        if memory is not None:
            storage = StorageWeakRef(memory.untyped_storage())
            alive.append(_Piece(storage, frozenset(map(_identity, gradients)), found_inf))
        self._pieces = alive

    def known(self, gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The flags of the pieces of memory that are all here, and the other gradients. The flag of
        a piece in part would tell of gradients that are not here."""
        identities = list(map(_identity, gradients))
        given, known = set(identities), set[tuple[int, int]]()
        flags = []
        for piece in self._pieces:
            if piece.gradients <= given and not piece.storage.expired():
                known |= piece.gradients
                flags.append(piece.found_inf)
        pairs = zip(gradients, identities, strict=True)
        return flags, [gradient for gradient, identity in pairs if identity not in known]


class _Piece(NamedTuple):
    storage: StorageWeakRef
    gradients: frozenset[tuple[int, int]]
    found_inf: Tensor


def _identity(gradient: Tensor) -> tuple[int, int]:
    return gradient.data_ptr(), gradient._version


def _is_dense(tensor: Tensor) -> bool:
    layout = FORMATS.get(tensor.dim(), torch.contiguous_format)
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=layout)
