"""Small models, each with one thing that a graph compiler is likely to trip over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .case import Batch, Case, distance_loss, generator, seeded, tensor_batch


class TwoLayers(nn.Module):
    """The frame of most cases here: a layer, `middle`, a layer."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.last = nn.Linear(width, width)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.middle(self.first(x)))


class WeightNorm(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.first)
        nn.utils.parametrizations.orthogonal(self.last)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return F.mish(x)


class SpectralNorm(TwoLayers):
    """Power iteration writes its buffers in train mode."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.first)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return F.leaky_relu(x)


class FourierFilter(TwoLayers):
    """A learned complex filter, as in global filter networks."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(9, 2))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x, norm="ortho") * torch.view_as_complex(self.filter)
        return torch.fft.irfft(spectrum, n=x.shape[-1], norm="ortho")


class DoublePart(TwoLayers):
    """A middle whose weights and arithmetic are float64."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(16, 16, dtype=torch.float64)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.wide(x.double())).float()


class Checkpointed(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.block, x, use_reentrant=False)


class StraightThrough(torch.autograd.Function):
    """Rounds to eighths; the gradient passes as if it had not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t().to(grad.dtype), x.t().to(grad.dtype) @ grad


class CustomFunction(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return StraightThrough.apply(x, self.weight)


class TiedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(self.embed(ids))))


class DictOutput(TwoLayers):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = torch.sigmoid(self.first(x))
        return {"scores": self.last(hidden), "hidden": [hidden], "width": x.shape[-1]}


@dataclass
class Scores:
    scores: torch.Tensor
    hidden: torch.Tensor | None = None


class DataclassOutput(TwoLayers):
    def forward(self, x: torch.Tensor) -> Scores:
        hidden = F.silu(self.first(x))
        return Scores(self.last(hidden), hidden=hidden)


class DataDependentBranch(TwoLayers):
    """The value of a tensor decides which layer runs."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        if x.abs().mean().item() > 0:
            return torch.tanh(x)
        return x


class DataDependentSize(TwoLayers):
    """How many rows go on depends on their values."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        kept = x[x[:, 0] > -100.0]
        return kept.exp().clamp(max=10.0)


class EinsumAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).unbind(2)
        scores = torch.einsum("bqhd,bkhd,h->bhqk", q, k, self.scale)
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)


class InPlaceBuffers(TwoLayers):
    """Writes a buffer, and slices of an activation, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(16))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        out = torch.zeros_like(x)
        out[:, :8] = x[:, 8:]
        out[:, 8:].copy_(x[:, :8]).mul_(2.0)
        return out + self.average


class OwnAutocast(TwoLayers):
    """A region that the author fenced off from low precision."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mixer(x)
        with torch.autocast("cpu", enabled=False):
            x = x.float()
            return x / x.square().mean(-1, keepdim=True).add(1e-6).sqrt()


class Hooked(TwoLayers):
    """A forward hook rescales the first layer's output; the layer is called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(halve)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.relu(self.first(input=x)))


def halve(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 0.5


def tokens(seed: int, size: int) -> Batch:
    return (torch.randint(0, 50, ((3, 8), (4, 12))[size], generator=generator(seed)),), {}


ROWS_OF_16 = tensor_batch(((8, 16), (5, 16)))
SEQUENCE = tensor_batch(((3, 8, 16), (4, 12, 16)))
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Batch]]] = {
    "weight_norm": (WeightNorm, ROWS_OF_16),
    "spectral_norm": (SpectralNorm, ROWS_OF_16),
    "fourier_filter": (FourierFilter, ROWS_OF_16),
    "double_part": (DoublePart, ROWS_OF_16),
    "checkpointed": (Checkpointed, ROWS_OF_16),
    "custom_function": (CustomFunction, ROWS_OF_16),
    "tied_weights": (TiedWeights, tokens),
    "dict_output": (DictOutput, ROWS_OF_16),
    "dataclass_output": (DataclassOutput, ROWS_OF_16),
    "data_dependent_branch": (DataDependentBranch, ROWS_OF_16),
    "data_dependent_size": (DataDependentSize, ROWS_OF_16),
    "einsum_attention": (EinsumAttention, SEQUENCE),
    "in_place_buffers": (InPlaceBuffers, ROWS_OF_16),
    "own_autocast": (OwnAutocast, ROWS_OF_16),
    "hooked": (Hooked, ROWS_OF_16),
}


def cases() -> list[Case]:
    return [
        Case(name, "unusual", partial(seeded, name, build), batch, distance_loss)
        for name, (build, batch) in CASES.items()
    ]
