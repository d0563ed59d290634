"""Tensors that a graph's end only hands on: what reads them behind it sees what was given."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X = torch.randn(4, 8)


class Network(nn.Module):
    """A network and its loss, which no graph holds. `pass_on` says what the loss is given."""

    def __init__(self, pass_on: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.pass_on = nn.Linear(8, 8), pass_on

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.loss(self.layer(batch["x"]), self.pass_on(batch, batch["x"]))

    def loss(self, y: Tensor, given: Any) -> Tensor:
        torch._dynamo.graph_break()
        for boxes in given.values() if isinstance(given, dict) else given:
            y = y + (boxes(2) if callable(boxes) else boxes).sum()
        return y.square().mean()


def changed(batch: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    batch["more"] = x * 2
    return batch


# What is handed on: what the model was given, or what it made of that.
PASS_ON: dict[str, Callable[[Any, Tensor], Any]] = {
    "the dictionary": lambda batch, x: batch,
    "a new dictionary": lambda batch, x: dict(batch, more=x + 1),
    "a dictionary that it wrote to": changed,
    "its values": lambda batch, x: list(batch.values()),
    "its values, twice": lambda batch, x: (*batch.values(), *batch.values()),
    "what iterates over them": lambda batch, x: iter([*batch.values(), x * 2]),
    "a function of them": lambda batch, x: [partial(torch.mul, batch["boxes"])],
}


@pytest.mark.parametrize("name", PASS_ON)
def test_what_comes_in_front_is_not_captured_for_the_sizes_of_what_it_hands_on(name: str) -> None:
    plain = Network(PASS_ON[name])
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for boxes in (3, 4, 1, 0, 5):
        batch = {"x": X, "boxes": torch.rand(boxes, 4), "also": torch.rand(2)}
        given, kept = dict(batch), dict(batch)
        expected = plain(given)
        loss = model(batch)
        assert batch.keys() == given.keys() and all(batch[key] is kept[key] for key in kept)
        torch.testing.assert_close(loss, expected, rtol=0.02, atol=0.02)
        loss.backward()
    layers = [plan for plan in amp_graph.plans(model) if "linear" in str(plan.paints)]
    assert len(layers) == 1


def test_what_is_kept_by_a_key_that_is_asked_for_is_not_read() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.layer(batch["x"]) * (2 if "boxes" in batch else 1)

    model = amp_graph.convert(Asks(), policy="bfloat16")
    for boxes in (3, 4, 1, 0, 5):
        model({"x": X, "boxes": torch.rand(boxes, 4)})
    assert len(amp_graph.plans(model)) == 1
