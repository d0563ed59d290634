"""The protocol between the boundaries of graphs and a loss scale."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from amp_graph.training.checked_gradients import CheckedGradients
from amp_graph.training.held_scale import HeldScale
from amp_graph.watched import FirstNonfinite


class ModelScale(Protocol):
    """A model's loss scale, as the boundaries of its graphs see it."""

    def is_on(self) -> bool:
        """Whether gradients are scaled in graphs that run from now on."""

    def for_call(self, inputs: Sequence[Tensor]) -> Scale:
        """Return the scale for a call of a graph that has these inputs with gradients."""


class Scale(Protocol):
    """The loss scale of one call of a graph."""

    def factor(self, gradient: Tensor, create_graph: bool, double_backward: bool = False) -> Tensor:
        """Return S for a gradient that comes in, 0-dimensional, float32; the same for all gradients
        of one backward pass. Copy it if it has to outlive the pass.

        create_graph: whether the pass is recorded, for another derivative.
        double_backward: whether it is that of a recorded pass.
        """

    def inverse(self, device: torch.device) -> Tensor:
        """Return 1/S, 0-dimensional, float32."""

    def held_on(self, devices: Sequence[torch.device]) -> HeldScale:
        """Return S on each of these devices, for a graph that reads it itself, in its backward
        pass."""

    @property
    def checked(self) -> CheckedGradients:
        """The gradients that were checked when they went out."""

    @property
    def watch(self) -> FirstNonfinite | None:
        """Set while graphs are to look for values that are not finite."""

    def note_parameters(self, parameters: Iterable[Tensor]) -> None:
        """Take note that a graph got parameters that it has not had before."""

    def spill_on(self, device: torch.device) -> Tensor | None:
        """Return a flag to set if a gradient overflowed that goes out to what the model does not
        own; None if nobody asks."""
