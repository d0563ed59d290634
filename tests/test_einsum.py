"""An einsum is a matrix product only if it contracts an index; `torch.autocast` is the measure."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import amp_graph

SIZES = {"a": 5, "b": 6, "c": 7}  # more than places have


class Einsum(nn.Module):
    def __init__(self, equation: str) -> None:
        super().__init__()
        self.equation, self.scale = equation, nn.Parameter(torch.ones(()))

    def forward(self, *operands: Tensor) -> Tensor:
        return torch.einsum(self.equation, *operands) * self.scale


def operands_of(equation: str, sizes: Mapping[str, int]) -> list[Tensor]:
    operands = equation.partition("->")[0].split(",")
    return [torch.rand([sizes[i] for i in operand]) for operand in operands]


@st.composite
def equations(draw: st.DrawFn) -> str:
    operands = draw(st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=2))
    given = sorted({i for operand in operands for i in operand})
    kept = draw(st.lists(st.sampled_from(given), unique=True))
    result = draw(st.sampled_from(["->" + "".join(kept), ""]))
    return ",".join(operands) + result


@given(equations())
@settings(max_examples=60, deadline=None)
def test_einsum_is_low_where_autocast_has_it_low(equation: str) -> None:
    torch._dynamo.reset()

    batch = operands_of(equation, SIZES)
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.einsum(equation, *batch)
    policy = amp_graph.Policy("bfloat16", level="safe")
    model = amp_graph.convert(Einsum(equation), policy=policy, example_inputs=batch)
    (plan,) = amp_graph.plans(model)
    products = {"einsum", "bmm", "mm", "matmul"}
    is_low = any(name.rstrip("_0123456789") in products for name in plan.low)
    assert is_low == (expected.dtype is torch.bfloat16), equation


@pytest.mark.parametrize(
    "equation", ["na,na,na->n", "na,nb,abc->nc", "na,ab,bc,nc->n", "a,b,c->abc"]
)
@pytest.mark.usefixtures("fresh_dynamo")
def test_einsum_of_many_operands_is_computed_as_under_autocast(equation: str) -> None:
    """Pair by pair, of which some are matrix products and others element-wise, in float32."""

    batch = operands_of(equation, {"n": 5, "a": 6, "b": 7, "c": 8})  # more than places have
    with torch.autocast("cpu", torch.bfloat16):
        expected = Einsum(equation)(*batch)
    model = amp_graph.convert(Einsum(equation), policy=amp_graph.Policy("bfloat16", level="safe"))
    assert torch.equal(model(*batch), expected.float())


@pytest.mark.usefixtures("fresh_dynamo")
def test_rotary_angles_are_exact() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)
            self.register_buffer("frequencies", 1e4 ** -torch.linspace(0, 1, 16))

        def forward(self, x: Tensor) -> Tensor:
            positions = torch.arange(x.shape[1], dtype=torch.float32)
            angles = torch.einsum("i,j->ij", positions, self.frequencies)
            return self.layer(x) * torch.cat([angles.cos(), angles.sin()], -1)

    model, x = Rotary(), torch.randn(2, 2048, 32)
    expected = model(x)
    amp_graph.convert(model, policy="bfloat16")
    assert float((model(x) - expected).norm() / expected.norm()) < 0.01
