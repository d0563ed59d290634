"""Gradients that need no second look for infinities: they were checked when they were made."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from amp_graph.gradients.engine import OUTSIDE, backward_pass, check_and_unscale_, look_at_
from amp_graph.gradients.memory import Memories

_address, _version = Tensor.data_ptr, attrgetter("_version")  # in C, for all at once


class CheckedGradients:
    """The gradients that were unscaled and checked on their way out, with one flag for those of one
    backward pass on one device.

    A gradient is known again by its address, while its memory is alive, and by its version, which
    is the same in `.grad` where autograd took the tensor over. A gradient that was accumulated, or
    replaced by a hook, is not known. One that was written to since is looked at again, and what was
    found before counts as well: clipped by value, an infinity becomes a finite number. A write that
    leaves the version alone is not seen: through `.grad.data`, as with GradScaler after `unscale_`;
    by a collective such as `torch.distributed.all_reduce` (torch 2.13), so that one of several
    processes must not ask; or by a foreach function under a dispatch mode. No gradient is kept
    alive.

    hearing: lists that get the flags of passes that begin from now on.
    """

    def __init__(self) -> None:
        self._checks: list[_Check] = []
        self.hearing: list[list[Tensor]] = []
        self._enough = 0  # checks; when there are as many, those that are gone are forgotten

    def unscale_(self, gradients: list[Tensor], inverse: Tensor) -> None:
        """Multiply fresh gradients, all on one device, by 1/S, and check them, in one pass."""
        check = self._check_on(inverse.device)
        check_and_unscale_(gradients, check.found_inf, inverse)
        check.note(gradients)

    def look_at(self, gradients: list[Tensor]) -> None:
        """Check gradients, all on one device, as they lie in `.grad` now."""
        if not gradients:
            return
        check = self._check_on(gradients[0].device)
        look_at_(gradients, check.found_inf)
        check.note(gradients)

    def _check_on(self, device: torch.device) -> _Check:
        """Return the check of the backward pass which is running, or a new one."""
        made_in = backward_pass(), device
        for check in self._checks if made_in[0] != OUTSIDE else ():
            if check.made_in == made_in:
                return check
        if len(self._checks) >= self._enough:
            self._checks = [check for check in self._checks if check.memories.are_alive()]
            self._enough = 2 * len(self._checks) + 1
        check = _Check(made_in, torch.zeros((), dtype=torch.float32, device=device))
        for flags in self.hearing:
            flags.append(check.found_inf)
        self._checks.append(check)  # beside those that other devices' threads append
        return check

    def were_judged(self) -> None:
        """Take note that an optimizer has stepped, or not, by what was checked up to now."""
        for check in self._checks:
            check.is_judged = True

    def forget_judged(self) -> None:
        """Forget, as a round has ended, the checks that were judged: memory that is overwritten in
        place is the same in the next round. Checks of a backward pass after the last step are for
        the next one."""
        self._checks = [check for check in self._checks if not check.is_judged]

    def known(self, gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the flags of the checks whose gradients are all here, and the gradients that no
        check knows.

        The latter may be looked at into these flags, which are a check's own only if nothing else
        is here. The flag of a check with gradients elsewhere, or yet to be made, might tell of
        those.
        """
        try:
            given = [*zip(map(_address, gradients), map(_version, gradients), strict=True)]
        except RuntimeError:
            return [], [*gradients]
        here = dict(given)
        running = backward_pass()
        known: dict[int, int] = {}
        flags = []
        for check in self._checks:
            is_done = running == OUTSIDE or check.made_in[0] != running
            if is_done and check.gradients.keys() <= here.keys() and check.memories.are_alive():
                known |= check.gradients
                flags.append(check.found_inf)
        if known == here:
            return flags, []
        if len(flags) > 1 or known.keys() < here.keys():
            flags = [flag.clone() for flag in flags]
        pairs = zip(gradients, given, strict=True)
        return flags, [g for g, (address, version) in pairs if known.get(address) != version]


class _Check:
    """The gradients that were checked in one backward pass, on one device."""

    def __init__(self, made_in: tuple[int, torch.device], found_inf: Tensor):
        self.made_in = made_in
        self.found_inf = found_inf
        self.is_judged = False
        self.gradients: dict[int, int] = {}  # versions by address
        self.memories = Memories()

    def note(self, gradients: Sequence[Tensor]) -> None:
        """Take note that these were checked, as they are."""
        try:
            made = [*zip(map(_address, gradients), map(_version, gradients), strict=True)]
        except RuntimeError:  # inference tensors have no versions
            return
        self.gradients |= made
        self.memories.add(gradients)
