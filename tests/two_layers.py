"""What tests of small models share: two layers, what they are called on, in which precisions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.utils.rnn import pack_padded_sequence
from training import scaled

from amp_graph import Policy

BFLOAT16 = 0.03  # how far gradients may be from those in float32, relative
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
POLICIES = {"bfloat16": Policy("bfloat16"), "scaled": scaled(2.0**8)}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)


class Speaking(nn.Module):
    """A block that says something in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        self.speak(hidden)
        return x + self.b(torch.relu(hidden))

    def speak(self, hidden: Tensor) -> None:
        raise NotImplementedError


class Loop(nn.Module):
    """Blocks in a loop, at a break in which Dynamo leaves all of the forward to Python."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Reverse(Function):
    """As the one between a network and the adversary of its features (Ganin et al. 2016)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -3 * gradient


class Product(Function):
    """As in LoHa of peft, which takes less memory than autograd would. A graph inside, in which
    Dynamo recorded products."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return gradient @ b.T, a.T @ gradient


class Packed(nn.Module):
    """A layer runs between its graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rnn, self.last = nn.Linear(8, 8), nn.GRU(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.first(x)[:, None], torch.tensor([4]))
        _, h = self.rnn(packed)
        return self.last(h)
