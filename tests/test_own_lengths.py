"""Tuples and lists whose class answers `len` otherwise, or not at all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Irrep(tuple):
    """As in e3nn."""

    def __len__(self) -> int:
        raise NotImplementedError


class Named(list):
    def __len__(self) -> int:
        raise NotImplementedError


class Summed(tuple):
    def __len__(self) -> int:
        return sum(self)


class Unpacks(nn.Module):
    def __init__(self, items: tuple[int, ...] | list[int]) -> None:
        super().__init__()
        self.layer, self.items = nn.Linear(8, 8), items

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        for item in self.items:
            h = h * item
        return h


@pytest.mark.parametrize("kind", [Irrep, Named, Summed])
def test_their_items_are_read_and_counted(kind: type) -> None:
    model = amp_graph.convert(Unpacks(kind((2, 3))), policy="bfloat16")
    expected = model.layer(X) * 6
    for items, factor in (((2, 3), 1), ((2, 3, 4), 4), ((2, 3), 1)):
        model.items = kind(items)
        torch.testing.assert_close(model(X), expected * factor, rtol=0.02, atol=0.05)
    assert [plan.fallback for plan in amp_graph.plans(model)] == [None, None]
