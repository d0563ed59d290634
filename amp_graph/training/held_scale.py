"""The loss scale S as tensors, for graphs that scale their gradients themselves."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from amp_graph.training.scale import Scale


class HeldScale(NamedTuple):
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
    def held(self, scale: Scale, devices: Sequence[torch.device]) -> HeldScale:
        """Return the held scale of a call whose passes have this scale."""
        for device in devices:
            if device not in self._on:
                self._on[device] = torch.ones((), dtype=torch.float32, device=device)
        chosen = [*map(self._on.__getitem__, devices)]
        return HeldScale(scale, [memory.data for memory in chosen], chosen)
