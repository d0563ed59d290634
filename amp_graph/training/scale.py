"""What the boundaries of graphs ask of a loss scale."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from amp_graph.training.checked_gradients import CheckedGradients
from amp_graph.training.held_scale import HeldScale
from amp_graph.watched import FirstNonfinite


class ModelScale(Protocol):
    """What the boundaries of a model's graphs ask of its loss scale."""

    def is_on(self) -> bool:
        """Whether gradients are scaled in graphs that run from now on."""

    def for_call(self, inputs: Sequence[Tensor]) -> Scale:
        """What scales them in a call of a graph that has these inputs with gradients."""


class Scale(Protocol):
    """What one call of a graph asks of it."""

    def factor(self, gradient: Tensor, create_graph: bool, double_backward: bool = False) -> Tensor:
        """S for a gradient that comes in, 0-dimensional, float32; the same for all gradients of
        one backward pass. What is to outlive it has to be a copy. `create_graph`: the pass is
        recorded, for another derivative. `double_backward`: it is that of a recorded pass."""

    def inverse(self, device: torch.device) -> Tensor:
        """1/S, 0-dimensional, float32."""

    def held_on(self, devices: Sequence[torch.device]) -> HeldScale:
        """S on each of these devices, for a graph that reads it itself, in its backward pass."""

    @property
    def checked(self) -> CheckedGradients:
        """The gradients that were checked when they went out."""

    @property
    def watch(self) -> FirstNonfinite | None:
        """Set while graphs are to look for values that are not finite."""

    def note_parameters(self, parameters: Iterable[Tensor]) -> None:
        """Called when a graph gets parameters that it has not had before."""

    def spill_on(self, device: torch.device) -> Tensor | None:
        """A flag to set where a gradient overflowed that goes out to what the model does not own;
        None if nobody asks."""
