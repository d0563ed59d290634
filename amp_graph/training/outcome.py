"""What became of a loss scale, to be told when it is gone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from amp_graph.training.loss_scale import LossScale, ScaleState


@dataclass(frozen=True)
class Outcome:
    """The scale's own tensors, read only when asked for: reading waits for the device.

    state, skipped: before its last round, in which an optimizer found `found_inf`; None: none
        looked. `counts`: as in `LossScale.adjust`.
    """

    config: LossScale
    state: ScaleState
    skipped: Tensor
    found_inf: Tensor | None
    counts: bool
    is_on: bool

    @property
    def skips(self) -> int:
        """As `GraphScale.skips`."""
        return int(self.skipped) + (0 if self.found_inf is None else int(self.found_inf))

    def get_scale(self) -> float:
        """As `GraphScale.get_scale`."""
        if self.found_inf is None or not self.is_on:
            return float(self.state.scale) if self.is_on else 1.0
        return float(self.config.adjust(self.state, self.found_inf, self.counts).scale)
