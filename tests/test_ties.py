"""Rounding makes ties, of which the gradients of maxima are shared otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Of(nn.Module):
    """A maximum of what another product reads as well."""

    def __init__(self, function: Callable[..., Tensor], layer: type[nn.Module], *sizes: int):
        super().__init__()
        self.function, self.one, self.other = function, layer(*sizes), layer(*sizes)

    def forward(self, *given: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(self.function(*given)), self.other(given[0])


G = torch.Generator().manual_seed(0)
NEAR = torch.rand(64, 16, generator=G) * 100
IMAGE = torch.rand(2, 3, 32, 32, generator=G) * 20 + 100
LINE = torch.rand(4, 16, 64, generator=G) + 10
CASES: dict[str, tuple[Of, tuple[Tensor, ...]]] = {
    **{
        function.__name__: (
            Of(function, nn.Linear, 16, 4),
            (NEAR, NEAR + torch.randn(64, 16, generator=G)),
        )
        for function in (torch.maximum, torch.minimum, torch.fmax, torch.fmin)
    },
    "amax": (Of(lambda x: x.amax(1), nn.Linear, 64, 4), (LINE,)),
    "amin": (Of(lambda x: x.amin(1), nn.Linear, 64, 4), (LINE,)),
    "max_pool1d": (Of(lambda x: F.max_pool1d(x, 3, 1, 1), nn.Linear, 64, 4), (LINE,)),
    "max_pool2d": (Of(lambda x: F.max_pool2d(x, 3, 1, 1), nn.Conv2d, 3, 8, 1), (IMAGE,)),
}


def gradients(model: nn.Module, given: tuple[Tensor, ...], *around: Any) -> list[Tensor]:
    inputs = [x.clone().requires_grad_() for x in given]
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(around)):
        results = model(*inputs)
    sum(y.float().square().sum() for y in results).backward()
    return [x.grad for x in inputs if x.grad is not None]


def test_gradients_go_to_the_elements_that_they_go_to_under_autocast() -> None:
    for name, (plain, given) in CASES.items():
        expected, autocast = gradients(plain, given), gradients(plain, given, "autocast")
        model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
        for g, e, a in zip(gradients(model, given), expected, autocast, strict=True):
            assert (g - e).norm() <= 1.05 * (a - e).norm() + 1e-6, name
        amp_graph.restore(model)


def test_behind_low_values_they_are_low() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), Pool(), nn.Conv2d(8, 8, 1))
    amp_graph.convert(model, policy="bfloat16")
    model(IMAGE)
    (plan,) = amp_graph.plans(model)
    assert [n for n in plan.low if "pool" in plan.facts[n].op]


class Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x.relu(), 2)
