"""What the tests of compiled graphs share: a model in eager mode and compiled, and comparisons."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx, nn
from training import distance, gradients

import amp_graph
from amp_graph import Policy

COMPILE_FX = "torch._inductor.compile_fx.compile_fx"
BFLOAT16 = 2**-7  # a few roundings of 2**-9 each, in another order


def pair(model: nn.Module, dtype: str = "bfloat16", **policy: Any) -> tuple[nn.Module, nn.Module]:
    """The model converted, in eager mode and compiled."""
    twin = copy.deepcopy(model)
    compiled = Policy(dtype, compiler="inductor", **policy)
    return amp_graph.convert(model, policy=Policy(dtype, **policy)), amp_graph.convert(
        twin, policy=compiled
    )


def assert_close(a: torch.Tensor, b: torch.Tensor, within: float = BFLOAT16) -> None:
    assert a.shape == b.shape and a.dtype is b.dtype and a.requires_grad is b.requires_grad
    assert distance(b, a) <= within


def assert_same_step(models: tuple[nn.Module, nn.Module], *args: Any) -> None:
    """One forward and backward pass of both: outputs, gradients and buffers agree."""
    results = []
    for model in models:
        torch.manual_seed(1)
        inputs = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
        result = model(*inputs)
        result.square().mean().backward()
        results.append((result, [x.grad for x in inputs]))
    (first, ins), (second, others) = results
    assert_close(first, second)
    a, b = [*gradients(models[0]), *ins], [*gradients(models[1]), *others]
    assert [_kind(g) for g in a] == [_kind(g) for g in b]
    # All as one: the gradient of a bias before batch norm is nothing but rounding.
    assert_close(*(torch.cat([g.flatten() for g in each if g is not None]) for each in (a, b)))
    for a, b in zip(models[0].buffers(), models[1].buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=BFLOAT16, atol=BFLOAT16)
    assert [p.uncompiled for p in amp_graph.plans(models[1])] == [None] * len(
        amp_graph.plans(models[1])
    )


def _kind(gradient: torch.Tensor | None) -> Any:
    return None if gradient is None else (gradient.dtype, gradient.shape)


class Buffered(nn.Module):
    """Writes into a buffer and its input, and returns a view of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        y = self.linear(x)
        x.mul_(2)
        return y, x[1:]


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    """The model converted, in float16."""
    return amp_graph.convert(model, policy=Policy("float16", compiler="inductor", **options))


def count(graphs: list[fx.GraphModule], target: Any) -> int:
    """How many nodes call a target."""
    return sum(node.target is target for graph in graphs for node in graph.graph.nodes)
