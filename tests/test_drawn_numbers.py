"""Numbers that a model draws with Python's `random`."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from training import twins
from two_layers import Two, X

import amp_graph
from amp_graph.convert import record_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def joined(model: Two, h: Tensor) -> Tensor:
    """As StyleGAN2 mixes styles."""
    index = random.randint(1, 5)
    return torch.cat([h.repeat(index, 1), 2 * h.repeat(6 - index, 1)])


def mixed(model: Two, h: Tensor) -> Tensor:
    share = random.uniform(0.1, 0.9)
    return share * h + (1 - share) * h.flip(0)


def cut_out(model: Two, h: Tensor) -> Tensor:
    start = random.randrange(6)
    return torch.cat([h[:, : start + 2] * 0.5, h[:, start + 2 :]], dim=1)


def repeated(model: Two, h: Tensor) -> Tensor:
    for _ in range(random.randint(1, 3)):
        h = model.a(h)
    return h


class Drawing(Two):
    def __init__(self, draw: Callable[[Two, Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.draw(self, self.a(x)))


@pytest.mark.parametrize("draw", [joined, mixed, cut_out, repeated])
def test_what_is_computed_with_a_drawn_number_is_captured(
    draw: Callable[[Two, Tensor], Tensor],
) -> None:
    plain, model = twins(Drawing(draw), "bfloat16")
    for seed in range(6):
        random.seed(seed)
        expected = plain(X)
        after = random.random()
        random.seed(seed)
        torch.testing.assert_close(model(X), expected, rtol=0.05, atol=0.05)
        assert random.random() == after
    assert not any(plan.autocast for plan in record_of(model).plans)
    assert "a random number of Python's" in str(amp_graph.explain(model))


class Noisy(Two):
    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b):
            x = layer(x) * random.uniform(0.5, 1.5)
        return x


def test_a_drawn_number_in_a_loop_is_captured_with_it() -> None:
    plain, model = twins(Noisy(), "bfloat16")
    for seed in range(3):
        random.seed(seed)
        expected = plain(X)
        random.seed(seed)
        torch.testing.assert_close(model(X), expected, rtol=0.05, atol=0.05)
    assert not record_of(model).breaks and len(record_of(model).plans) == 1
