"""Operands of which only type or size is read are not cast for it."""

from __future__ import annotations

import copy

import pytest
import torch
from graphs import SIZE, W, X, run
from torch import nn

import amp_graph
from amp_graph.ir import Color


class DataDependentRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = self.linear(x)[x[:, 0] > 0.5]
        return self.linear(kept.relu()), x.new_ones(kept.shape[0])


def test_nothing_is_cast_to_read_its_size() -> None:
    torch._dynamo.reset()
    plain = DataDependentRows()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    assert [t.shape for t in model(X)] == [t.shape for t in plain(X)]
    (plan,) = amp_graph.plans(model)
    assert plan.fallback is None
    sizes = [f for f in plan.facts.values() if "sym_size" in f.op]
    assert sizes and all(f.color is Color.CLEAR and not f.reads for f in sizes)
    assert {r for cast in plan.casts for r in cast.readers}.isdisjoint(f.name for f in sizes)


@pytest.mark.parametrize("like", [torch.ops.aten.to.other, torch.ops.aten.type_as.default])
@pytest.mark.parametrize("convert", [lambda t: t, lambda t: t > 0.5], ids=["float", "bool"])
def test_a_tensor_that_gives_its_type_alone_is_not_cast(like, convert) -> None:
    """Neither from the low precision it was made in, nor to the one its type is asked in."""

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product = (x @ w).relu()
        return like(convert(x), product).exp(), like(convert(x), w) @ product

    result = run(function, X, W, weights=1)
    assert [f.reads for f in result.plan.facts.values() if "type_as" in f.op] == []
    assert "relu -> float32" not in result.casts()
    (exact, rounded), expected = result(X, W), function(X, W)
    assert torch.equal(exact, expected[0])
    torch.testing.assert_close(rounded, expected[1], rtol=0.02, atol=0.02)


def test_type_as_in_float32_does_not_round():
    def function(x, w):
        return w.type_as(x @ w) + 0, w

    result = run(function, X, W)
    assert torch.equal(result(X, W)[0], W)


class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x) + torch.ones(8)


def test_lines_are_the_model_s_under_a_default_device():
    """It is a mode that every call of PyTorch goes through."""
    model = Draws()
    torch.set_default_device("cpu")
    try:
        amp_graph.convert(model)(torch.randn(2, 8))
    finally:
        torch.set_default_device(None)
    sources = {f.op: f.source for f in amp_graph.plans(model)[0].facts.values()}
    line = Draws.forward.__code__.co_firstlineno + 1
    for op in ("aten.linear.default", "aten.add.Tensor", "aten.ones.default"):
        assert sources[op] == f"test_metadata.py:{line} in forward"
