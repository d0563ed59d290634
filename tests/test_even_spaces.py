"""Evenly spaced numbers, as many as a size that varies: grids and reference points."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SPACES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "centres": lambda x, n: torch.linspace(0.5, n - 0.5, n, dtype=x.dtype, device=x.device),
    "corners": lambda x, n: torch.linspace(0, n - 1, n),
    "of a grid": lambda x, n: torch.linspace(-1, 1, steps=n),
    "falling": lambda x, n: torch.linspace(start=3.0, end=-2.0, steps=n + 3),
    "double": lambda x, n: torch.linspace(0.1, 0.7, n, dtype=torch.float64),
}


class Placed(nn.Module):
    def __init__(self, spaces: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.layer, self.spaces = nn.Linear(8, 8), spaces

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layer(x)
        places = self.spaces(x, x.size(1))
        return self.layer(x) + places.float().sum(), places


@pytest.mark.parametrize("spaces", SPACES.values(), ids=SPACES.keys())
def test_as_many_as_a_size_that_varies(spaces: Callable[[Tensor, int], Tensor]) -> None:
    model = amp_graph.convert(Placed(spaces), policy="bfloat16")
    for size in (4, 7, 64, 5, 301, 2):
        result, places = model(torch.randn(2, size, 8))
        result.sum().backward()
        expected = spaces(torch.randn(1), size)
        assert places.dtype is expected.dtype
        torch.testing.assert_close(places, expected, rtol=1e-6, atol=1e-6)
        assert places[-1] == expected[-1] and places[0] == expected[0]
    assert len(amp_graph.plans(model)) == 2


@pytest.mark.parametrize(
    "spaces",
    [
        lambda x, n: torch.linspace(0, 1, n, dtype=torch.float16),
        lambda x, n: torch.linspace(torch.tensor(0.0), torch.tensor(1.0), n),
        lambda x, n: torch.linspace(0, 1, n, requires_grad=True).detach(),
        lambda x, n: torch.linspace(0, 9, n, dtype=torch.int64),
        lambda x, n: torch.linspace(0, 1, n - 1),
    ],
    ids=["half", "between tensors", "with a gradient", "whole", "down to one"],
)
def test_others_stay_as_they_are(spaces: Callable[[Tensor, int], Tensor]) -> None:
    model = amp_graph.convert(Placed(spaces), policy="bfloat16")
    for size in (4, 7, 2):
        places = model(torch.randn(2, size, 8))[1]
        torch.testing.assert_close(places, spaces(torch.randn(1), size))
