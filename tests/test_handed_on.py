"""Tensors that a graph's end only hands on: what reads them behind it sees what was given."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
            y = y + boxes.sum()
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
