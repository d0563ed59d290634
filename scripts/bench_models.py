"""The models of the benchmark: small enough for two CPU cores, in the styles that people train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Workload:
    """A model and a function from model to loss, on fixed data."""

    model: nn.Module
    loss: Callable[[nn.Module], torch.Tensor]


def mlp(device: str) -> Workload:
    layers = [m for _ in range(4) for m in (nn.Linear(1024, 1024), nn.ReLU())]
    x, y = _classes(device, 256, 1024)
    model = nn.Sequential(*layers, nn.Linear(1024, 10))
    return Workload(model, lambda m: F.cross_entropy(m(x), y))


class Block(nn.Module):
    """A pre-norm transformer block; `explicit` spells attention out."""

    def __init__(self, width: int, heads: int, explicit: bool):
        super().__init__()
        self.heads, self.explicit = heads, explicit
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        if self.explicit:
            scores = q @ k.transpose(-2, -1) * shape[-1] ** -0.5
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            mixed = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder with learned positions and a tied head."""

    def __init__(self, vocabulary: int, width: int, depth: int, length: int, explicit: bool):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, width // 64, explicit) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def gpt(device: str, batch: int, length: int, explicit: bool = False) -> Workload:
    ids = torch.randint(0, 1000, (batch, length + 1), device=device)
    model = GPT(1000, 256, 4, length, explicit)

    def loss(m: nn.Module) -> torch.Tensor:
        return F.cross_entropy(m(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return Workload(model, loss)


class Residual(nn.Module):
    """Two convolutions with batch norm and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, groups=groups, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, groups=groups, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.short(x))


def resnet(device: str, groups: int = 1) -> Workload:
    x = torch.randn(16, 3, 32, 32, device=device)
    y = torch.randint(0, 10, (16,), device=device)
    blocks = [
        Residual(32, 32, 1, groups),
        Residual(32, 64, 2, groups),
        Residual(64, 128, 2, groups),
    ]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    model = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1), *blocks, *head)
    return Workload(model, lambda m: F.cross_entropy(m(x), y))


class UNet(nn.Module):
    """One level down, one up, with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, 2, 1)
        self.deep = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.SiLU())
        self.up, self.leave = nn.ConvTranspose2d(64, 32, 2, 2), nn.Conv2d(64, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = F.silu(self.enter(x))
        return self.leave(torch.cat([wide, self.up(self.deep(F.silu(self.down(wide))))], 1))


def unet(device: str) -> Workload:
    x = torch.randn(4, 3, 64, 64, device=device)
    return Workload(UNet(), lambda m: F.mse_loss(m(x), x))


class Translator(nn.Module):
    """GNMT-like: recurrent encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(500, 128)
        self.encoder = nn.LSTM(128, 128, batch_first=True)
        self.decoder = nn.LSTM(128, 128, batch_first=True)
        self.head = nn.Linear(128, 500)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        _, state = self.encoder(self.words(source))
        return self.head(self.decoder(self.words(target), state)[0])


def seq2seq(device: str) -> Workload:
    ids = torch.randint(0, 500, (16, 17), device=device)

    def loss(m: nn.Module) -> torch.Tensor:
        scores = m(ids[:, :8], ids[:, 8:-1])
        return F.cross_entropy(scores.flatten(0, 1), ids[:, 9:].flatten())

    return Workload(Translator(), loss)


class NCF(nn.Module):
    """Neural collaborative filtering: embeddings and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(5000, 64), nn.Embedding(5000, 64)
        layers = [m for i in (128, 256, 128) for m in (nn.LazyLinear(i), nn.ReLU())]
        self.rate = nn.Sequential(*layers, nn.LazyLinear(1))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return self.rate(torch.cat([self.users(user), self.items(item)], 1)).squeeze(1)


def ncf(device: str) -> Workload:
    pairs = torch.randint(0, 5000, (2, 1024), device=device)
    likes = torch.rand(1024, device=device).round()
    model = NCF()
    model(*pairs.cpu())  # the lazy layers take their sizes
    return Workload(model, lambda m: F.binary_cross_entropy_with_logits(m(*pairs), likes))


def _classes(device: str, count: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, width, device=device)
    return x, torch.randint(0, 10, (count,), device=device)


WORKLOADS: dict[str, Callable[[str], Workload]] = {
    "mlp": mlp,
    "gpt compute-bound": lambda device: gpt(device, 8, 128),
    "gpt launch-bound": lambda device: gpt(device, 1, 64),
    "gpt explicit attention": lambda device: gpt(device, 4, 128, explicit=True),
    "resnet": resnet,
    "resnext": lambda device: resnet(device, groups=8),
    "unet": unet,
    "seq2seq lstm": seq2seq,
    "ncf": ncf,
}
