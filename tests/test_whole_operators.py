"""Operators that Dynamo would take apart as it captures."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("name", ["addcmul_", "addcdiv_"])
def test_an_operator_that_writes_is_captured_as_it_is(name: str) -> None:
    """Dynamo would make two of it, the second without a gradient in torch 2.12."""

    class Adds(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x).clone()
            return getattr(y, name)(x, x.exp(), value=0.5) @ self.weight

    torch.manual_seed(0)
    plain, x = Adds(4, 4), torch.rand(4, 4)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    model(x).sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(model.weight.grad, plain.weight.grad, rtol=0.02, atol=0.02)
    (plan,) = amp_graph.plans(model)
    assert f"aten.{name}.default" in {f.op for f in plan.facts.values()}
