"""Branches that bring back what is not finite, as in each layer of a detector of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import DetrConfig
from transformers.models.detr.modeling_detr import DetrEncoderLayer

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def all_finite(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        clamp_value = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-clamp_value, max=clamp_value)
    return x


def any_infinite(x: Tensor) -> Tensor:
    if torch.isinf(x).any() or torch.isnan(x).any():
        bound = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-bound, max=bound)
    return x


def infinite_alone(x: Tensor) -> Tensor:
    if torch.isinf(x).any():
        bound = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-bound, max=bound)
    return x


def narrow(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        bound = 1.0
        x = torch.clamp(x, min=-bound, max=bound)
    return x


def another(x: Tensor) -> Tensor:
    y = x + 1
    if not torch.isfinite(x).all():
        bound = torch.finfo(x.dtype).max - 1000
        y = torch.clamp(y, min=-bound, max=bound)
    return y


def crossed(x: Tensor) -> Tensor:
    y = x + 1
    if not torch.isfinite(x).all():
        bound = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(y, min=-bound, max=bound)
    return x


def counting(x: Tensor) -> Tensor:
    n = 0
    if not torch.isfinite(x).all():
        bound = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-bound, max=bound)
        n = n + 1
    return x * 2 if n else x


def otherwise(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        bound = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-bound, max=bound)
    else:
        x = x * 2
    return x


def double(x: Tensor) -> Tensor:
    return all_finite(x.double()).float()


def half(x: Tensor) -> Tensor:
    return all_finite(x.half()).float()


CAPTURED = [all_finite, any_infinite, infinite_alone, double]
ENDED = [narrow, another, crossed, counting, otherwise, half]


class Net(nn.Module):
    def __init__(self, bring_back: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.bring_back = nn.Linear(4, 4, bias=False), bring_back
        nn.init.eye_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.bring_back(x) / 2)


INPUTS = [
    torch.tensor([[1.0, -2.0, 65000.0, 0.0]]),
    torch.tensor([[1.0, torch.inf, -torch.inf, 0.0]]),
    torch.tensor([[1.0, torch.nan, 0.0, 0.0]]),
    torch.tensor([[torch.finfo(torch.float32).max, 1.0, 0.0, 0.0]]),
]


@pytest.mark.parametrize("bring_back", CAPTURED + ENDED)
def test_values_are_those_of_the_model(bring_back: Callable[[Tensor], Tensor]) -> None:
    model = Net(bring_back)
    converted = amp_graph.convert(copy.deepcopy(model), policy="bfloat16")
    for x in INPUTS:
        with torch.autocast("cpu", torch.bfloat16):
            expected = model(x).float()
        torch.testing.assert_close(converted(x).float(), expected, equal_nan=True)
    assert (len(amp_graph.plans(converted)) == 1) == (bring_back in CAPTURED)


@pytest.mark.parametrize("bring_back", CAPTURED)
def test_gradients_are_those_of_the_model(bring_back: Callable[[Tensor], Tensor]) -> None:
    model = Net(bring_back)
    converted = amp_graph.convert(copy.deepcopy(model), policy="bfloat16")
    x = INPUTS[0].clone().requires_grad_()  # of the largest number some versions take no gradient
    found, expected = (torch.autograd.grad(m(x).sum(), x)[0] for m in (converted, model))
    torch.testing.assert_close(found, expected)


def test_a_detector_s_layer_is_one_graph_in_training() -> None:
    config = DetrConfig(d_model=16, encoder_attention_heads=2, encoder_ffn_dim=16, dropout=0.0)
    plain = DetrEncoderLayer(config).train()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    x, positions = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    expected, found = (m(x, None, positions) for m in (plain, model))
    assert (found - expected).norm() <= 0.01 * expected.norm()
    (plan,) = amp_graph.plans(model)
    assert not plan.fallback and any("clamp" in facts.op for facts in plan.facts.values())
