"""Gradients of parameters that a graph reads in float32: unscaled where they are, if nobody else's.

What autograd hands out may be in the memory of another gradient, and dividing that by the scale
twice would be wrong by the scale.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counting import DispatchCounter
from torch import Tensor, nn
from training import assert_same_gradients, scaled, twins

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

INDICES = torch.tensor([[1, 2, 3, 3], [4, 1, 0, 7]])
SCALED = scaled(2.0**10)


class Reader(nn.Module):
    def __init__(self, sparse: bool = False):
        super().__init__()
        self.table = nn.Embedding(10, 8, sparse=sparse)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 10)

    def forward(self, indices: Tensor) -> Tensor:
        return self.out(self.norm(self.table(indices)))


class TwoLookups(Reader):
    def forward(self, indices: Tensor) -> Tensor:
        return self.out(self.norm(self.table(indices) + self.table(indices.flip(0))))


class Tied(Reader):
    """One parameter, read in float32 by the embedding and in low precision by the product."""

    def __init__(self) -> None:
        super().__init__()
        self.out.weight = self.table.weight


class OneGradientForTwo(Reader):
    """Autograd gives the addends one gradient, in one piece of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(2, 4, 8))
        self.shift = nn.Parameter(torch.zeros(2, 4, 8))

    def forward(self, indices: Tensor) -> Tensor:
        return self.out(self.norm(self.table(indices)) + (self.offset + self.shift))


MODELS = {
    "one lookup": Reader,
    "sparse": lambda: Reader(sparse=True),
    "two lookups": TwoLookups,
    "tied": Tied,
    "one gradient for two": OneGradientForTwo,
}


def densified(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        p.grad = p.grad.to_dense() if p.grad is not None and p.grad.is_sparse else p.grad
    return model


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice with retain_graph"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_true(name: str, times: int) -> None:
    plain, model = twins(MODELS[name](), SCALED)
    for each in (plain, model):
        loss = each(INDICES).square().mean()
        for i in range(times):
            loss.backward(retain_graph=i + 1 < times)
    assert_same_gradients(densified(model), densified(plain))


class Copies(DispatchCounter):
    """Elements that fused calls copied."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def record(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name == "_foreach_copy_":
            self.elements += sum(t.numel() for t in args[0])


def test_those_of_embeddings_and_norms_are_not_copied() -> None:
    _, model = twins(Reader(), SCALED)
    loss = model(INDICES).square().mean()
    with Copies() as copies:
        loss.backward()
    assert copies.elements == sum(p.numel() for p in model.out.parameters())
