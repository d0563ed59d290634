"""What a case of the zoo is, and the parts that the families share."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

Batch = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One architecture at tiny size.

    make: builds the model in train mode, float32, the same weights at every call. Its forward
        draws no random numbers; it may write buffers.
    batch: (seed, size) -> the arguments of one forward; size 0 and 1 have different shapes.
    loss: the model's output -> a scalar.
    """

    name: str
    family: str
    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[Any], torch.Tensor]

    def __str__(self) -> str:
        return self.name


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def seeded(name: str, build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model in train mode from a seed of its own, and leave the global state alone.

    Parameters are moved off their initial zeros and ones: a zero bias hides what adding it
    costs, and a norm of an all-zero token has gradients of a million.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(name.encode()))
        model = build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model.train()


def exportable(model: nn.Module) -> nn.Module:
    """In evaluation, without transformers' caches, whose classes torch.export does not know."""
    config: Any = getattr(model, "config", None)
    for each in (config, config.get_text_config()) if config is not None else ():
        each.use_cache = False
    return model.eval()


def floating_outputs(output: Any) -> list[torch.Tensor]:
    """The differentiable tensors of an output, whatever holds them."""
    if not isinstance(output, (torch.Tensor, dict, list, tuple)):
        output = vars(output)
    leaves = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
    return [t for t in leaves if t.is_floating_point() or t.is_complex()]


def distance_loss(output: Any) -> torch.Tensor:
    """Mean squared distance of the first floating output to a fixed random target."""
    first = floating_outputs(output)[0]
    first = torch.view_as_real(first) if first.is_complex() else first
    target = torch.randn(first.shape, generator=generator(1)).to(first.device)
    return (first.float() - target).square().mean()


def own_loss(output: Any) -> torch.Tensor:
    """The loss that the model computed itself."""
    return output["loss"] if isinstance(output, dict) else output.loss


def tensor_batch(
    *shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> Callable[[int, int], Batch]:
    """Normal random positional arguments; each is given as (shape at size 0, at size 1)."""

    def batch(seed: int, size: int) -> Batch:
        g = generator(seed)
        return tuple(torch.randn(pair[size], generator=g) for pair in shapes), {}

    return batch
