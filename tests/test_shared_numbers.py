"""Models of a kind for which no captures hold: whether they are captured under one number."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_graph
from amp_graph.calls.capture_cache import SEVERAL, number_for

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
@pytest.mark.parametrize("kind", [float, int])
def test_numbers_beyond_a_range_are_known_in_each_of_many_models(
    dtype: str, kind: type[float | int]
) -> None:
    for fold in range(SEVERAL + 3):
        model = Rescaling(kind(180_000 + 1000 * fold), kind(80_000 + 1000 * fold))
        expected = copy.deepcopy(model)(X)
        result = amp_graph.convert(model, policy=dtype)(X)
        torch.testing.assert_close(result, expected, rtol=2e-2, atol=1000)


class MeanOfRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x)) / len(x)


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.sharpness, self.fill = nn.Linear(8, 2), 1.0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x)) * self.sharpness
        return y.masked_fill(y > self.sharpness / 4, self.fill - 1)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps = nn.Linear(8, 2), 1

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x)) / len(x) * self.steps


@pytest.mark.parametrize(("sharpness", "fill"), [(1e-7, -1e-6), (2.0, 3.0), (1e6, -1e9)])
def test_numbers_that_change_between_calls_are_in_range(sharpness: float, fill: float) -> None:
    model, plain = amp_graph.convert(Annealed(), policy="float16"), Annealed()
    plain.load_state_dict(model.state_dict())
    for model.sharpness, model.fill in ((1.0, 0.0), (3.0, 2.0), (sharpness, fill)):
        result = model(X)
    plain.sharpness, plain.fill = sharpness, fill
    torch.testing.assert_close(result, plain(X), rtol=1e-2, atol=1e-2 * sharpness)
    assert len(amp_graph.plans(model)) == 2
    assert {p.rule for p in amp_graph.plans(model)[1].paints.values()} >= {"number not known"}


@pytest.mark.parametrize("count", [3, 10**6, -(10**9)])
def test_integers_that_change_between_calls_are_in_range(count: int) -> None:
    model, plain = amp_graph.convert(Counting(), policy="float16"), Counting()
    plain.load_state_dict(model.state_dict())
    for rows, model.steps in ((2, 1), (3, 2), (4, count)):
        result = model(X[:rows])
    plain.steps = count
    torch.testing.assert_close(result, plain(X), rtol=1e-2, atol=0.01)
    plan = amp_graph.plans(model)[-1]
    assert (plan.precision("div"), plan.precision("mul")) == ("float16", "float32")


def test_a_size_that_changes_is_a_number_in_range() -> None:
    model = amp_graph.convert(MeanOfRows(), policy="float16")
    for rows in (2, 3, 4):
        model(X[:rows])
    assert amp_graph.plans(model)[-1].precision("div") == "float16"


@pytest.mark.parametrize(
    ("hosts", "number"),
    [
        ([2, 1], None),
        ([3, 2, 1], 3),
        ([3, 3, 2, 1], 3),
        ([3, 3, 3, 2, 1], None),  # tried, and of no use
        ([6, 3, 3, 3, 2, 1], None),
    ],
)
def test_number_of_the_latest_is_shared(hosts: list[int], number: int | None) -> None:
    captures: Any = [SimpleNamespace(number=host) for host in hosts]
    assert number_for(captures) == number
