"""While a model is captured nobody looks at gradients, which another thread may write to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import meta_utils
from training import Mlp, X, distance
from two_layers import BFLOAT16

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Remembers(Mlp):
    """Looks at a gradient itself."""

    def forward(self, x: Tensor) -> Tensor:
        gradient = self.first.weight.grad
        y = super().forward(x)
        return y if gradient is None else y * gradient.norm() + gradient.sum()


@pytest.mark.parametrize("make", [Mlp, Remembers])
def test_gradients_are_looked_at_by_the_model_alone(make: type[nn.Module], monkeypatch) -> None:
    seen, look = [], meta_utils.safe_grad

    def safe_grad(tensor: Any) -> Any:
        seen.append(tensor)
        return look(tensor)

    monkeypatch.setattr(meta_utils, "safe_grad", safe_grad)
    curves = []
    for is_converted in (False, True):
        torch.manual_seed(0)
        model = make()
        if is_converted:
            amp_graph.convert(model, policy="bfloat16")
        losses = []
        for step in range(4):
            y = model(X)
            y.square().mean().backward()
            losses.append(y.detach())
            if step == 2:
                model.zero_grad()
        curves.append(torch.stack(losses))
    assert distance(curves[1], curves[0]) <= 2 * BFLOAT16
    assert not seen and all(p.converts for p in amp_graph.plans(model))
    assert meta_utils.safe_grad is safe_grad
