"""Gradients that need no second look for infinities: they were checked when they were made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class CheckedGradients:
    """The gradients that were unscaled and checked on their way out, by groups with one flag each.

    One is known again by its address, while its memory is alive, and by its version, which is the
    same in `.grad` where autograd took the tensor over. What was accumulated, replaced by a hook,
    or written to since is not known. A write that leaves the version alone is not seen: through
    `.grad.data`, as with GradScaler after `unscale_`, or by a collective such as
    `torch.distributed.all_reduce` (torch 2.13), so that one of several processes must not ask; or
    by a foreach function under a dispatch mode. Holds on to no gradient.
    """

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        self._enough = 0  # groups; when there are as many, those that are gone are forgotten

    def unscale_(self, gradients: list[Tensor], inverse: Tensor) -> None:
        """Multiply fresh gradients, all on one device, by 1/S, and check them, in one pass."""
        found_inf = torch.zeros_like(inverse)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse)
        memory = [StorageWeakRef(gradient.untyped_storage()) for gradient in gradients]
        if len(self._groups) >= self._enough:
            self._groups = [*filter(_Group.is_alive, self._groups)]
            self._enough = 2 * len(self._groups) + 1
        self._groups.append(_Group(frozenset(_identities(gradients)), memory, found_inf))

    def known(self, gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The flags of the groups that are all here, and the other gradients. The flag of a group
        of which some are elsewhere might tell of those."""
        given = list(_identities(gradients))
        here = frozenset(given)
        known: set[tuple[int, int]] = set()
        flags = []
        for group in self._groups:
            if group.gradients <= here and group.is_alive():
                known |= group.gradients
                flags.append(group.found_inf)
        pairs = zip(gradients, given, strict=True)
        return flags, [gradient for gradient, identity in pairs if identity not in known]


class _Group(NamedTuple):
    gradients: frozenset[tuple[int, int]]
    memory: list[StorageWeakRef]
    found_inf: Tensor

    def is_alive(self) -> bool:
        return not any(map(StorageWeakRef.expired, self.memory))


def _identities(gradients: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Address and version, without a Python call for each gradient."""
    return zip(map(Tensor.data_ptr, gradients), map(_version, gradients), strict=True)


_version = attrgetter("_version")
