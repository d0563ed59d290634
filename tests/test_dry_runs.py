"""Parts that a module's constructor calls, to see what sizes come of them, are no models yet."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import amp_graph


class Sized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())
        self.tried = self.body(torch.ones(1, 1, 8, 8))
        self.head = nn.Linear(self.tried.shape[1], 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def test_a_model_that_tries_its_parts_in_its_constructor_is_converted_as_a_whole(start):
    installation, model = start(), Sized()
    assert not installation.models.seen
    model(torch.randn(2, 1, 8, 8))
    assert [m.name for m in installation.models.seen] == ["Sized"]
    assert amp_graph.is_converted(model) and not amp_graph.is_converted(model.body)
