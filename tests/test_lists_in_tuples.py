"""Lists in a tuple that a model holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X = torch.ones(4, 8)


class Net(nn.Module):
    def __init__(self, held: Any, gain: Callable[[Any, Tensor], float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.held, self.gain = held, gain

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.gain(self.held, x)


@pytest.mark.parametrize(
    ("make", "gain", "change"),
    [
        (lambda: ([1.0], [2.0]), lambda held, x: held[1][0], lambda held: held[1].insert(0, 7.0)),
        (
            lambda: (([1], 3), 5),
            lambda held, x: held[0][0][0],
            lambda held: held[0][0].insert(0, 8),
        ),
        (lambda: ("a", {1}), lambda held, x: sum(held[1]), lambda held: held[1].add(7)),
    ],
)
def test_are_read(make: Any, gain: Any, change: Any) -> None:
    plain = Net(make(), gain)
    model = amp_graph.convert(Net(make(), gain), policy="bfloat16")
    for call in range(5):
        if call == 2:
            change(plain.held)
            change(model.held)
        torch.testing.assert_close(model(X), plain(X), rtol=0.05, atol=0.05)
    assert len(amp_graph.plans(model)) <= 3 and amp_graph.plans(model)[0].low


class Collects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.held: Any = ([1], "a", ([],))

    def forward(self, x: Tensor) -> Tensor:
        self.held[0].append(x.shape[0])
        self.held[2][0].append("b")
        return self.layer(x)


def test_are_written_to() -> None:
    model = amp_graph.convert(Collects(), policy="bfloat16")
    for _ in range(4):
        model(X)
    assert model.held == ([1, 4, 4, 4, 4], "a", (["b"] * 4,))
