"""Models of a kind for which no captures hold: whether they are captured under one number."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_graph
from amp_graph.calls.alike import SEVERAL, number_for

X = torch.linspace(-1, 1, 32).reshape(4, 8)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Rescaling(nn.Module):
    """As a model of a cross-validation, with the mean and deviation of its own part of the data."""

    def __init__(self, mean: float, deviation: float):
        super().__init__()
        self.layer, self.mean, self.deviation = nn.Linear(8, 2), mean, deviation

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.deviation + self.mean


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_numbers_beyond_a_range_are_known_in_each_of_many_models(dtype: str) -> None:
    for fold in range(SEVERAL + 3):
        model = Rescaling(180_000.0 + 1000 * fold, 80_000.0 + 1000 * fold)
        expected = copy.deepcopy(model)(X)
        result = amp_graph.convert(model, policy=dtype)(X)
        torch.testing.assert_close(result, expected, rtol=2e-2, atol=1000)


@pytest.mark.parametrize(
    ("hosts", "dtype", "number"),
    [
        ([2, 1], torch.bfloat16, None),
        ([3, 2, 1], torch.bfloat16, 3),
        ([3, 3, 2, 1], torch.bfloat16, 3),
        ([3, 3, 3, 2, 1], torch.bfloat16, None),  # tried, and of no use
        ([6, 3, 3, 3, 2, 1], torch.bfloat16, None),
        ([3, 2, 1], torch.float16, None),
    ],
)
def test_number_of_the_latest_is_shared(
    hosts: list[int], dtype: torch.dtype, number: int | None
) -> None:
    captures: Any = [SimpleNamespace(number=host) for host in hosts]
    assert number_for(captures, dtype) == number
