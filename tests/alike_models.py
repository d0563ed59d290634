"""What the tests of models that are alike share: two networks, a step, a count of captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Net(nn.Module):
    def __init__(self, slope: float = 0.1, tied: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.LeakyReLU(slope))
        self.head = nn.Linear(8, 8)
        if tied:
            self.head.weight = self.body[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Branching(Net):
    """Several graphs, of which data decides the second."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.head(h) if h.sum() > 0 else self.head(-h)


def captured(run: Callable[[], Any]) -> int:
    """How many frames Dynamo captures in it."""
    before = counters["frames"]["total"]
    run()
    return counters["frames"]["total"] - before


def step(model: nn.Module, x: Tensor = X) -> list[Tensor]:
    """What a training step gives: the output, gradients, buffers."""
    model.zero_grad()
    output = model(x)
    output.square().mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [t.detach().clone() for t in (output, *gradients, *model.buffers())]
