"""The protocol between the boundaries of graphs and a loss scale, and S as tensors, for graphs that
scale their gradients themselves."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from amp_graph.gradients.checked_gradients import CheckedGradients
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

    def inputs_on(self, devices: Sequence[torch.device]) -> ScaleInputs:
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


class ScaleInputs(NamedTuple):
    """The loss scale S of one call.

    numbers: S on each of the graph's devices. Their versions do not count up: autograd keeps them
        from the forward pass, and they may be written to before the backward pass.
    chosen: the memory of these into which S is written when it is chosen for a pass; empty if S is
        that of the round.
    """

    scale: Scale
    numbers: Sequence[Tensor]
    chosen: Sequence[Tensor] = ()

    def choose(self, gradient: Tensor, create_graph: bool) -> None:
        """Write S, for the backward pass in which this gradient comes in."""
        factor = self.scale.factor(gradient, create_graph)
        for memory in self.chosen:
            memory.copy_(factor, non_blocking=True)


class ChosenNumbers(threading.local):
    """Memory for S where it is chosen for each backward pass, for one thread. Of the passes of its
    calls one has ended before another goes on, or runs inside it."""

    def __init__(self) -> None:
        self._on: dict[torch.device, Tensor] = {}

    @torch.inference_mode(False)
    def for_call(self, scale: Scale, devices: Sequence[torch.device]) -> ScaleInputs:
        """Return S for a call whose passes have this scale."""
        for device in devices:
            if device not in self._on:
                self._on[device] = torch.ones((), dtype=torch.float32, device=device)
        chosen = [*map(self._on.__getitem__, devices)]
        return ScaleInputs(scale, [memory.data for memory in chosen], chosen)
