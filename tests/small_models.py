"""Small models for dumps; their lines are in golden files, so add new ones at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Small:
    """A model and the arguments of one call."""

    make: Callable[[], nn.Module]
    inputs: tuple[Any, ...]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.scores = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.hidden(x))
        return F.softmax(self.scores(self.norm(hidden)), dim=-1)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x)))
        x = F.max_pool2d(x, 2)
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) * 8**-0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).tril()
        scores = scores.masked_fill(~mask, float("-inf"))
        return x + self.out(scores.softmax(-1) @ v)


class Precise(nn.Module):
    """The user asked for float32, and an operator is on no list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).float().exp() + 1
        best = torch.cummax(self.second(hidden), dim=1).values
        return best * 1e-9


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, c = torch.zeros(2, 4), torch.zeros(2, 4)
        for step in x:
            h, c = self.cell(step, (h, c))
        return h


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.block, x, use_reentrant=False))


SMALL = {
    "classifier": Small(Classifier, (torch.zeros(4, 8),)),
    "conv": Small(Conv, (torch.zeros(2, 3, 8, 8),)),
    "attention": Small(Attention, (torch.zeros(2, 5, 8),)),
    "precise": Small(Precise, (torch.zeros(4, 8),)),
    "recurrent": Small(Recurrent, (torch.zeros(2, 2, 4),)),
    "checkpointed": Small(Checkpointed, (torch.zeros(4, 8),)),
}


class Odd(nn.Module):
    """Names that would break a page, a DOT file or a path if they were not escaped."""

    NAMES = ("<script>ran = 1</script>", '"];}<b>&amp;', "back\\slash'")

    def __init__(self) -> None:
        super().__init__()
        for name in self.NAMES:
            self.add_module(name, nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x
