"""Spills: gradients that went out of a model to what it does not own, and overflowed on the way."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from amp_graph.gradients.engine import OUTSIDE, any_of, backward_pass

LeftOver = bool | Tensor  # whether gradients that were to be stepped by before were not finite


class Spills:
    """The spills of one model: the flags of this round, and whether there were any before it.

    An optimizer of parameters that are no model's own takes no part in rounds: its gradients may be
    from an earlier one, and some that it could not step by may be left over. `left_over` tells
    whether there are; it is None for other optimizers, whose parameters have a scale and are always
    checked.

    last_pass: the last backward pass in which there may have been a spill.
    """

    def __init__(self) -> None:
        self.last_pass = 0
        self._flags: dict[torch.device, Tensor] = {}
        self._device = torch.device("cpu")
        self._writes = 0
        self._writes_before = 0  # this round
        self._shown = WeakIdKeyDictionary()  # to whom, and how many writes there were until then

    def flag_on(self, device: torch.device) -> Tensor:
        """Return the flag on a device, to be written to in a backward pass: 1 once something
        spilled."""
        self._writes += 1
        if (running := backward_pass()) != OUTSIDE:
            self.last_pass = running
        self._device = device
        if device not in self._flags:
            self._flags.setdefault(device, torch.zeros((), dtype=torch.float32, device=device))
        return self._flags[device]

    def are_new_to(self, by: object, left_over: LeftOver | None = None) -> bool:
        """Whether there may have been some since they were shown to `by`, or it holds some; the
        host does not wait."""
        if left_over is None:
            return bool(self._flags) and self._shown.get(by, 0) < self._writes
        is_held = left_over is not False
        return self._writes > 0 and (is_held or self._shown.get(by, 0) < self._writes)

    def show(self, by: object, left_over: LeftOver | None) -> Tensor | None:
        """Whether anything may have spilled into the gradients of who is about to step; None if
        nothing went out."""
        flags = [*self._flags.values()]
        if left_over is not None and self._shown.get(by, 0) < self._writes_before:
            left_over = True  # for all that is known
        if left_over is True:
            left_over = torch.ones((), dtype=torch.float32, device=self._device)
        if isinstance(left_over, Tensor):
            flags.append(left_over)
        if not flags:
            return None
        self._shown[by] = self._writes
        return any_of(flags, flags[0].device)

    def clear(self) -> None:
        """Begin a new round."""
        self._flags.clear()
        self._writes_before = self._writes
