"""Where autocast begins for code between graphs: behind the first one, if that is in front."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from training import assert_same_gradients
from two_layers import BFLOAT16

import amp_graph

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(3))

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class InFront(nn.Module):
    """As a LoRA layer asks (peft), with a loss behind it that writes into a tensor (trl)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        y = (y + self.b(self.a(x))).to(y.dtype)
        scores = torch.empty(16, len(x)).t()
        with torch.no_grad():
            torch.mm(y, self.fc.weight, out=scores)  # ends the graph, as `scores` is transposed
        return y * scores.sigmoid()


def test_a_graph_in_front_is_captured_without_autocast() -> None:
    plain = InFront()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for _ in range(3):
        plain.zero_grad()
        model.zero_grad()
        plain(X).square().mean().backward()
        model(X).square().mean().backward()
    assert_same_gradients(model, plain, within=BFLOAT16)
    between = [p.fallback for p in amp_graph.plans(model) if p.fallback]
    assert between == ["code between graphs (aten.mm.out) is not captured"]
    assert not torch.is_autocast_enabled("cpu")


@torch.compiler.disable
def product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x))


class FirstInRegion(nn.Module):
    """Its first graph, that of `inner`, runs inside of a region of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Plain()
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1):
            if torch.rand(1) >= 0.0:
                with torch.autocast("cpu", enabled=False):
                    x = self.inner(x)
                    self.seen.append(product(x, self.inner.fc.weight).dtype)
        return x


def test_a_region_around_the_first_graph_holds() -> None:
    model = amp_graph.convert(FirstInRegion(), policy="bfloat16")
    for _ in range(3):
        model(X)
    assert model.seen == [torch.float32] * 3


class FirstInside(Function):
    """The first graph, that of a part, runs inside of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, part: nn.Module) -> Tensor:
        x = part(x)
        torch._dynamo.graph_break()
        ctx.save_for_backward(x, weight)
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient, None


class FirstInFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Plain(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        for _ in range(1):
            torch._dynamo.graph_break()
            x = FirstInside.apply(x, self.last.weight, self.inner)  # type: ignore[no-untyped-call]
        return x


def test_it_does_not_begin_inside_of_a_function() -> None:
    plain = FirstInFunction()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for _ in range(3):
        for each in (plain, model):
            each.zero_grad()
            each(X).square().mean().backward()
        assert_same_gradients(model, plain, within=BFLOAT16)
    assert any(plan.autocast for plan in amp_graph.plans(model))
