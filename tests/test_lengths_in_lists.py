"""Lists of tensors whose lengths vary, down to 1 and 0, as the targets of a detector."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import twins

import amp_graph
from amp_graph.convert import record_of
from amp_graph.dynamo_changes.lengths_in_lists import ENDED

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X = torch.randn(3, 16)


@dataclass
class Boxes:
    rows: Tensor


class Detector(nn.Module):
    def __init__(self, read: Callable[[Any], list[Tensor]]) -> None:
        super().__init__()
        self.body, self.head, self.read = nn.Linear(16, 16), nn.Linear(16, 4), read

    def forward(self, x: Tensor, targets: Any) -> Tensor:
        boxes = self.head(torch.tanh(self.body(x)))
        return self.loss(boxes, self.read(targets))

    def loss(self, boxes: Tensor, rows: list[Tensor]) -> Tensor:
        parts = [(box - r).square().sum() for box, r in zip(boxes, rows, strict=True)]
        return torch.stack(parts).sum() / max(sum(len(r) for r in rows), 1)


# How the rows of the images are given, and how the model reads them.
GIVEN: dict[str, tuple[Callable[[list[Tensor]], Any], Callable[[Any], list[Tensor]]]] = {
    "a list": (list, list),
    "dictionaries": (lambda rows: [{"rows": r} for r in rows], lambda ts: [t["rows"] for t in ts]),
    "a tuple of them": (
        lambda rows: tuple({"rows": r} for r in rows),
        lambda ts: [t["rows"] for t in ts],
    ),
    "objects": (lambda rows: [Boxes(r) for r in rows], lambda ts: [t.rows for t in ts]),
    "a dictionary of lists": (lambda rows: {"rows": rows}, lambda t: list(t["rows"])),
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_is_in_front_of_such_a_list_is_not_captured_for_each_choice(name: str) -> None:
    give, read = GIVEN[name]
    plain, model = twins(Detector(read), "bfloat16")
    drawn = random.Random(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", amp_graph.ConversionWarning)
        for step in range(24):
            rows = [torch.rand(drawn.choice((0, 1, 2, 3)), 4) for _ in X]
            for m in (plain, model):
                m.zero_grad()
                m(X, give(rows)).backward()
            torch.testing.assert_close(
                model.body.weight.grad, plain.body.weight.grad, atol=2e-2, rtol=0
            )
            if step == 8:
                captured = len(amp_graph.plans(model))
    assert len(amp_graph.plans(model)) == captured <= 8
    assert any(ENDED in told for told in record_of(model).breaks)


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor, caches: Sequence[Tensor]) -> Tensor:
        return sum(cache.sum() for cache in caches) + self.layer(x).sum()


@pytest.mark.parametrize(
    "caches",
    [
        lambda length: [torch.rand(length, 4) for _ in range(4)],
        lambda length: (torch.rand(length, 4), torch.rand(7, 4)),
    ],
    ids=["a list of equal lengths", "a tuple"],
)
def test_no_other_list_ends_a_graph(caches: Callable[[int], Any]) -> None:
    model = amp_graph.convert(Caching(), policy="bfloat16")
    for length in (3, 2, 1, 4, 5):
        model(X, caches(length))
    assert not record_of(model).breaks
    assert len(amp_graph.plans(model)) == 3


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, *values: Tensor) -> Tensor:
        x, weight = values
        return (self.layer(x) * weight).sum()


def test_nor_do_arguments() -> None:
    model = amp_graph.convert(Weighted(), policy="bfloat16")
    for rows, weights in ((4, 4), (3, 3), (2, 1), (5, 1), (6, 6)):
        model(torch.randn(rows, 16), torch.rand(weights, 1))
    assert not record_of(model).breaks


class ReadsFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, sequences: list[Tensor]) -> Tensor:
        return self.layer(torch.cat(sequences)).sum()


def test_nor_does_one_that_a_model_begins_with() -> None:
    model = amp_graph.convert(ReadsFirst(), policy="bfloat16")
    for lengths in ((4, 3), (3, 5), (1, 4), (5, 6)):
        model([torch.rand(length, 4) for length in lengths])
    assert not record_of(model).breaks
    assert len(amp_graph.plans(model)) == 3
