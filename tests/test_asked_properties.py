"""Whether a model has an attribute that is a property: its getter runs when the model asks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Lazy(nn.Module):
    """Keeps what a matrix is made of until somebody asks for it, as kornia's augmentations do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.kept: tuple[Tensor, float] | None = None
        self.made: Tensor | None = None
        self.runs = 0

    @property
    def matrix(self) -> Tensor | None:
        self.runs += 1
        if self.made is None and self.kept is not None:
            matrix, scale = self.kept
            self.made, self.kept = matrix * scale, None
        return self.made

    @property
    def missing(self) -> Tensor:
        raise AttributeError("missing")

    def forward(self, x: Tensor) -> Tensor:
        if self.made is None and self.kept is None:
            return self.layer(x)
        matrix = getattr(self, "matrix", None)
        x = self.layer(x) if matrix is None else self.layer(x) @ matrix
        return x if not hasattr(self, "missing") else x * 2


def called(model: Any) -> list[Tensor]:
    results = []
    for i in range(5):
        torch.manual_seed(i)
        if i in (1, 3):
            model.kept, model.made = (torch.randn(4, 4), 2.0 + i), None
        results.append(model(torch.randn(3, 4)))
    return results


def test_a_getter_runs_as_often_as_it_is_asked() -> None:
    plain = Lazy()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for result, expected in zip(called(model), called(plain), strict=True):
        torch.testing.assert_close(result, expected, rtol=5e-2, atol=1e-1)
    assert model.runs == plain.runs == 4
    assert model.kept is None and not any(plan.fallback for plan in amp_graph.plans(model))


class Options:
    def __init__(self) -> None:
        self.runs = 0

    @property
    def doubles(self) -> bool:
        self.runs += 1
        return True


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.options = nn.Linear(4, 4), Options()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * 2 if hasattr(self.options, "doubles") else self.layer(x)


def test_a_getter_runs_once_for_whether_it_is_there() -> None:
    model = amp_graph.convert(Asks(), policy="bfloat16")
    for _ in range(4):
        model(torch.ones(2, 4))
    assert model.options.runs == 4
