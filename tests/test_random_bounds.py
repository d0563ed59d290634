"""Random numbers whose bounds change from call to call: noise for each size, noise that fades."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def neftune(x: Tensor, scale: float) -> Tensor:
    dims = torch.tensor(x.size(1) * x.size(2))
    magnitude = 5.0 / torch.sqrt(dims)
    return torch.zeros_like(x).uniform_(-magnitude, magnitude)


def by_math(x: Tensor, scale: float) -> Tensor:
    magnitude = 5.0 / math.sqrt(x.size(1))
    return torch.empty_like(x).uniform_(-magnitude, to=magnitude)


DRAWS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "as NEFTune": neftune,
    "by math": by_math,
    "to a size": lambda x, scale: torch.zeros_like(x).uniform_(to=x.size(1)),
    "normal": lambda x, scale: torch.zeros_like(x).normal_(1, torch.tensor(x.size(1)) ** -0.5),
    "mean": lambda x, scale: torch.zeros_like(x).normal_(torch.tensor(x.size(1)), std=0.1),
    "double": lambda x, scale: torch.zeros_like(x, dtype=torch.float64).normal_(0, x.size(1) * 0.1),
    "that fades": lambda x, scale: torch.zeros_like(x).normal_(std=scale),
    "of a tensor that fades": lambda x, scale: torch.zeros_like(x).normal_(0, torch.tensor(scale)),
}


class Noisy(nn.Module):
    def __init__(self, draw: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        self.layer, self.draw, self.scale = nn.Linear(8, 8), draw, 1.0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layer(x)
        noise = self.draw(x, self.scale)
        return self.layer(x + noise.float()), noise


def drawn(model: Noisy, size: int) -> tuple[Tensor, Tensor]:
    """What a model draws, and the state of the generator behind it."""
    model.scale *= 0.9
    torch.manual_seed(size)
    result, noise = model(torch.randn(2, size, 8))
    result.sum().backward()
    return noise, torch.get_rng_state()


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_bounds_that_change_are_captured_once_more(draw: Callable[[Tensor, float], Tensor]) -> None:
    plain, model = Noisy(draw), amp_graph.convert(Noisy(draw), policy="bfloat16")
    for size in (4, 7, 9, 5, 11):
        (wanted, state), (noise, state_behind) = drawn(plain, size), drawn(model, size)
        torch.testing.assert_close(noise, wanted, rtol=1e-6, atol=1e-6)
        assert torch.equal(state, state_behind)
    assert len(amp_graph.plans(model)) == 2


def test_wrong_bounds_raise_as_ever() -> None:
    model = amp_graph.convert(Noisy(DRAWS["that fades"]), policy="bfloat16")
    for size in (4, 7, 9):
        drawn(model, size)
    model.scale = -1.0
    with pytest.raises(RuntimeError, match="expects std >= 0"):
        drawn(model, 5)


@pytest.mark.parametrize(
    "bound",
    [
        lambda x: torch.tensor(1.0 * x.size(1)).mul_(x.detach().max()),
        lambda x: torch.tensor(x.size(1)) * x.detach().max(),
        lambda x: x.size(1) > 0,
    ],
    ids=["written", "multiplied", "boolean"],
)
def test_bounds_that_depend_on_data_are_left_to_pytorch(bound: Callable[[Tensor], Any]) -> None:
    def draw(x: Tensor, scale: float) -> Tensor:
        return torch.zeros_like(x).uniform_(-9, bound(x))

    plain = Noisy(draw)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for size in (4, 7, 9):
        wanted, state = drawn(plain, size)
        noise, state_behind = drawn(model, size)
        torch.testing.assert_close(noise, wanted, rtol=0.1, atol=0.1)
        assert torch.equal(state, state_behind)
