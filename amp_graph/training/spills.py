"""Spills: gradients that went out of a model to what it does not own, and overflowed on the way."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from amp_graph.training.engine import OUTSIDE, any_of, backward_pass


class Spills:
    """Those of one model in one round.

    last_pass: the backward pass in which there may have been one last.
    """

    def __init__(self) -> None:
        self.last_pass = 0
        self._flags: dict[torch.device, Tensor] = {}
        self._writes = 0
        self._shown = WeakIdKeyDictionary()  # to whom, and how many writes there were until then

    def flag_on(self, device: torch.device) -> Tensor:
        """The flag on a device, to be written to in a backward pass: 1 once something spilled."""
        self._writes += 1
        if (running := backward_pass()) != OUTSIDE:
            self.last_pass = running
        if device not in self._flags:
            self._flags.setdefault(device, torch.zeros((), dtype=torch.float32, device=device))
        return self._flags[device]

    def are_new_to(self, by: object) -> bool:
        """Whether there may have been some since they were shown to `by`; the host does not
        wait."""
        return bool(self._flags) and self._shown.get(by, 0) < self._writes

    def show(self, by: object) -> Tensor | None:
        """Whether anything spilled, for who is about to step; None if nothing went out."""
        if not self._flags:
            return None
        flags = [*self._flags.values()]
        self._shown[by] = self._writes
        return any_of(flags, flags[0].device)

    def clear(self) -> None:
        """A round has ended."""
        self._flags.clear()
