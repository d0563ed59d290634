"""Graphs of a model whose code between graphs runs under autocast: Dynamo recorded low values where
the graph, which is rewritten from float32, has none.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from training import assert_same_gradients, distance
from two_layers import BFLOAT16, Product

import amp_graph

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(3))

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class HandsOn(Function):
    """What is handed on to the backward was low when it was recorded, as the gradient was."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        y = (a @ b).tanh()
        ctx.save_for_backward(a, b, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b, y = ctx.saved_tensors
        gradient = gradient * (1 - y * y)
        return gradient @ b.T, a.T @ gradient


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.a, self.b = nn.Linear(4, 16).weight, nn.Linear(16, 4).weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        for _ in range(1):  # the graph breaks in a loop: Dynamo leaves all but the calls to Python
            if torch.rand(1) >= 0.0:
                y = y + self.part(x)
        return y

    def part(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class AsksForItsDtype(Layer):
    def part(self, x: Tensor) -> Tensor:
        weight = self.a @ self.b
        return linear(x.to(weight.dtype), weight)


class AsksForAFunctions(Layer):
    def part(self, x: Tensor) -> Tensor:
        weight = Product.apply(self.a, self.b)
        return linear(x.to(weight.dtype), weight)


class AsksInside(Layer):
    def part(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, x, use_reentrant=False)

    def inside(self, x: Tensor) -> Tensor:
        weight = self.a @ self.b
        return linear(x.to(weight.dtype), weight)


class AsksForAnInputs(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        for _ in range(1):
            if torch.rand(1) >= 0.0:
                y = self.of(torch.mm(self.a, self.b), y)
        return y

    def of(self, weight: Tensor, x: Tensor) -> Tensor:
        return linear(x.float().tanh().to(weight.dtype), weight)


class AsksInARegionWithout(Layer):
    """As norms and quantisers do, which compute in float32 and return what they were given."""

    def part(self, x: Tensor) -> Tensor:
        weight = self.a @ self.b
        with torch.autocast("cpu", enabled=False):
            x = x.float().tanh().to(weight.dtype)
        return linear(x, weight)


class OfAFunction(Layer):
    def part(self, x: Tensor) -> Tensor:
        return linear(x, HandsOn.apply(self.a, self.b)).tanh()


class OfACheckpoint(Layer):
    def part(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, self.fc(x), use_reentrant=False) * 2

    def inside(self, x: Tensor) -> Tensor:
        return linear(x, self.a @ self.b)


class OwnRegion(Layer):
    """What it asks for is what the region gives it, with or without ours around it."""

    def part(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(self.inside, self.fc(x), use_reentrant=False).relu()

    def inside(self, x: Tensor) -> Tensor:
        weight = self.a @ self.b
        return linear(x.to(weight.dtype), weight)


class Net(nn.Module):
    def __init__(self, kind: type[Layer]):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = kind(), kind()

    def forward(self, x: Tensor) -> Tensor:
        return self.k(torch.tanh(self.q(x)))


def trained(kind: type[Layer]) -> nn.Module:
    """After a few passes the gradients of the last are as in float32, and nothing was warned of."""
    plain = Net(kind)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for _ in range(3):
        results = []
        for each in (plain, model):
            each.zero_grad()
            results.append(each(X))
            results[-1].square().mean().backward()
        assert distance(results[1].float(), results[0]) <= BFLOAT16
    assert_same_gradients(model, plain, within=BFLOAT16)
    return model


ASKING = [AsksForItsDtype, AsksForAFunctions, AsksInside, AsksForAnInputs, AsksInARegionWithout]


@pytest.mark.parametrize("kind", ASKING, ids=lambda k: k.__name__)
def test_a_graph_that_asks_for_a_dtype_runs_as_it_was_recorded(kind: type[Layer]) -> None:
    """Whether the author meant this dtype, or that of a tensor, Dynamo does not tell."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = trained(kind)
    asking = [p for p in amp_graph.plans(model) if p.fallback and "asks for" in p.fallback]
    assert len(asking) >= 1
    assert all(p.autocast for p in asking)


@pytest.mark.parametrize("kind", [OfAFunction, OfACheckpoint], ids=lambda k: k.__name__)
def test_graphs_inside_are_rewritten_from_float32(kind: type[Layer]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = trained(kind)
    *_, last = amp_graph.plans(model)
    products = [
        f.name in plan.low
        for plan in last.parts()
        for f in plan.facts.values()
        if f.op in ("aten.linear.default", "aten.matmul.default")
    ]
    assert len(products) >= 3
    assert all(products)


def test_a_region_of_the_models_own_may_ask() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = trained(OwnRegion)
    fallbacks = {plan.fallback for plan in amp_graph.plans(model)}
    assert len(fallbacks) == 2
    assert all(reason is None or "between graphs" in reason for reason in fallbacks)


class Shares(nn.Module):
    """Code that is not captured returns a tensor and a view of it; a graph writes into one of them
    and reads the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    @torch._dynamo.disable
    def middle(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.second(x)
        return y, y[:, :8]

    def forward(self, x: Tensor) -> Tensor:
        y, view = self.middle(torch.relu(self.first(x)))
        y.mul_(3)
        return view * 1.0


@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
def test_what_shares_memory_goes_on_sharing_it(policy: str) -> None:
    torch.manual_seed(0)
    plain = Shares()
    model = amp_graph.convert(copy.deepcopy(plain), policy=policy)
    for _ in range(3):
        plain.zero_grad(), model.zero_grad()
        expected, result = plain(X), model(X)
        torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)
        expected.sum().backward(), result.sum().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert distance(p.grad, q.grad) < 0.02


class Refuses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.dtypes: list[torch.dtype] = []

    @torch._dynamo.disable
    def middle(self, x: Tensor) -> Tensor:
        if x.shape[0] == 3:
            raise ValueError("a bad batch")
        y = self.second(x)
        self.dtypes.append(y.dtype)
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(torch.relu(self.first(x))) + 1


def test_an_error_of_the_model_s_own_does_not_end_autocast() -> None:
    model = amp_graph.convert(Refuses(), policy="bfloat16")
    for size in (8, 8, 3, 8, 8):
        if size == 3:
            with pytest.raises(ValueError, match="a bad batch"):
                model(X[:size])
        else:
            model(X[:size])
    assert model.dtypes[1] is model.dtypes[-1] is torch.bfloat16


class Weighs(nn.Module):
    """A hook on what comes in weighs its gradient with what the graph has made of it."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x.detach().abs() + 1
        x.register_hook(self.weighed)
        x.register_hook(lambda gradient: None)
        return torch.relu(x)

    def weighed(self, gradient: Tensor) -> Tensor:
        print(gradient.dtype)  # so that it is no part of the graph
        return self.kept * gradient


class InALoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16), Weighs(), nn.Linear(16, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
def test_a_hook_of_a_low_gradient_may_return_float32(policy: str, capsys) -> None:
    torch.manual_seed(0)
    plain = InALoop()
    model = amp_graph.convert(copy.deepcopy(plain), policy=policy)
    for _ in range(3):
        plain.zero_grad(), model.zero_grad()
        plain(X).square().mean().backward(), model(X).square().mean().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert distance(p.grad, q.grad) < 0.02
    assert model.layers[1].kept.dtype is torch.float32
    assert "torch.bfloat16" in capsys.readouterr().out
    assert any("between graphs" in (plan.fallback or "") for plan in amp_graph.plans(model))
