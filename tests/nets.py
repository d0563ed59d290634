"""Small models for tests of conversion, and the share of their products that run low."""

from __future__ import annotations

from typing import Any

import torch
from counting import MatmulCounter
from torch import nn

X = torch.randn(4, 8)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x)))) * scale


def low_share(model: nn.Module, *args: Any, **kwargs: Any) -> float:
    with MatmulCounter() as counter:
        model(*args, **kwargs)
    return counter.low_share
