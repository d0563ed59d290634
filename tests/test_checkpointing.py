"""Gradient checkpointing inside a converted model recomputes what was computed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counting import MatmulCounter
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import amp_graph
from amp_graph import Policy

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def save_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


class Block(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Linear(16, 16), nn.Linear(16, 16), how

    def inner(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(torch.relu(self.first(x)), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, **self.how)


def trained(
    model: nn.Module, x: Tensor, policy: Policy | None
) -> tuple[list[Tensor], Tensor, MatmulCounter]:
    """Gradients, the random state after a step, and the matrix products of the step."""
    if policy is not None:
        amp_graph.convert(model, policy=policy)
        with torch.no_grad():
            model(x)
            model.train()(x)
    torch.manual_seed(5)
    with MatmulCounter() as products:
        model(x).square().mean().backward()
    return [p.grad for p in model.parameters()], torch.get_rng_state(), products


def recomputed(products: MatmulCounter) -> int:
    return sum(n for (name, _), n in products.backward.items() if name == "addmm")


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_dropped_stays_dropped(dtype: str, use_reentrant: bool) -> None:
    x = torch.randn(8, 16, requires_grad=use_reentrant)
    torch.manual_seed(0)
    model, plain = Block(use_reentrant=use_reentrant), Block(use_reentrant=use_reentrant)
    model.load_state_dict(plain.state_dict())
    found, state, products = trained(model, x, Policy(dtype))
    expected, expected_state, _ = trained(plain, x, None)
    assert torch.equal(state, expected_state)
    assert recomputed(products) > 0
    assert products.low_share == products.backward_low_share == 1
    for gradient, other in zip(found, expected, strict=True):
        assert (gradient - other).norm() < 0.02 * other.norm()


def test_selective_checkpointing_saves_what_it_is_told() -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    model = Block(use_reentrant=False, context_fn=contexts)
    _, _, products = trained(model, torch.randn(8, 16), Policy("bfloat16"))
    assert recomputed(products) == 0
