"""Calls on fake tensors, for estimates, leave nothing in a model whose parameters are real."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from nets import Net, low_share
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = torch.randn(4, 8)


def estimate(model: nn.Module) -> Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        result = model(mode.from_tensor(X))
        result.sum().backward()
    model.zero_grad()
    assert isinstance(result, FakeTensor)
    return result


def gradients(model: nn.Module) -> list[Tensor | None]:
    (model(X).square().mean() * 1e-3).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("when", ["before the first call", "later"])
def test_an_estimate_leaves_nothing(dtype: str, when: str) -> None:
    model = amp_graph.convert(Net(), policy=dtype)
    if when == "later":
        model(X), gradients(model)
        model.zero_grad()
    twin, plans = copy.deepcopy(model), amp_graph.plans(model)
    assert estimate(model).dtype is torch.float32
    result = model(X)
    assert type(result) is Tensor and torch.equal(result, twin(X))
    assert len(amp_graph.plans(model)) == max(len(plans), 1)
    for found, expected in zip(gradients(model), gradients(twin), strict=True):
        assert type(found) is Tensor and torch.equal(found, expected)
    assert low_share(model, X) == 1


def test_a_model_that_is_converted_in_an_estimate() -> None:
    model = Net()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        amp_graph.convert(model, policy="float16")(mode.from_tensor(X)).sum().backward()
    model.zero_grad()
    assert all(type(g) is Tensor for g in gradients(model))
    scale: Any = amp_graph.scale_of(model)
    assert scale.get_scale() == 2.0**16


def test_what_plain_pytorch_refuses_is_refused() -> None:
    model = amp_graph.convert(Net(), policy="bfloat16")
    with FakeTensorMode() as mode, pytest.raises(AssertionError, match="allow_non_fake_inputs"):
        model(mode.from_tensor(X))
    assert type(model(X)) is Tensor and low_share(model, X) == 1


def test_a_model_that_is_fake_itself_is_converted() -> None:
    with FakeTensorMode():
        model = amp_graph.convert(Net(), policy="float16")
        result = model(torch.randn(4, 8))
        result.sum().backward()
    assert isinstance(result, FakeTensor) and len(amp_graph.plans(model)[0].low) > 1
    assert isinstance(model.first.weight.grad, FakeTensor)
