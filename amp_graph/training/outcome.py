"""The outcome of a loss scale, to be told when it is gone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from amp_graph.training.loss_scale import LossScale, ScaleState


@dataclass(frozen=True)
class Outcome:
    """The scale's own tensors, read only when asked for: reading waits for the device.

    state, skipped: before its last round, in which an optimizer found `found_inf`; None: none
        looked. `counts`: as in `LossScale.adjust`. `is_used`: whether any optimizer ever stepped.
    """

    config: LossScale
    state: ScaleState
    skipped: Tensor
    found_inf: Tensor | None
    counts: bool
    is_on: bool
    is_used: bool

    @property
    def skips(self) -> int:
        """Rounds in which an optimizer skipped its step; waits for the device."""
        return int(self.skipped if self.found_inf is None else self.skipped + self.found_inf)

    def get_scale(self) -> float:
        """The loss scale as a number, 1 if it is off; waits for the device."""
        if not self.is_on:
            return 1.0
        if self.found_inf is None:
            return float(self.state.scale)
        return float(self.config.adjust(self.state, self.found_inf, self.counts).scale)
