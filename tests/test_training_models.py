"""Training of models of many kinds: their gradients are float32's, to float16's precision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, SparseAdam
from training import FLOAT16, Mlp, X, assert_same_gradients, distance, scaled, twins

import amp_graph

SCALED = scaled(2.0**8)


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


class Float64Part(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b((self.a(x).double().cumsum(0) / 3).tanh().float())


class Float64Output(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).double() * 2


class Float64Parameter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.rand(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.b((self.a(x) * self.wide).float())


class ComplexPart(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.fft.fft(self.a(x)).abs())


class ComplexParameter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.phases = nn.Parameter(torch.rand(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.view_as_real(self.a(x) * self.phases).sum(-1))


class ComplexOutput(Base):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(self.b(self.a(x)))


class GraphBreak(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).tanh()
        torch._dynamo.graph_break()
        return self.b(x) * self.a.weight.sum()


class BranchOnValue(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if x.sum().item() > 1e9:
            return x
        return self.b(x.tanh())


class WritesItsOutput(Base):
    def forward(self, x: Tensor) -> Tensor:
        out = self.b(self.a(x).tanh())
        out.mul_(2).add_(x)
        return out


class WritesItsInput(Base):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(self.a(torch.ones_like(x)))
        return self.b(x.mul_(2))


class SharedMemory(Base):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out = self.b(self.a(x).tanh())
        return out, out, out.t(), out[:2]


class ReturnsItsInput(Base):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, x.view(-1), self.b(self.a(x))


class ReturnsAWeight(Base):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.b(self.a(x)), self.a.weight * 1.0


class Nested(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return {"out": self.b(h), "more": [h, (h.detach(), None, 3)]}


class Batchnorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)  # normalised away
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)).relu())


class Frozen(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


class CustomFunction(Base):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * 3

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.Double.apply(self.a(x)))


class WeightFunction(nn.Module):
    """A weight that is used in low precision and in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w + self.w.exp().sum() * 1e-2


MODELS: list[Callable[[], nn.Module]] = [
    Float64Part, Float64Output, Float64Parameter, ComplexPart, ComplexParameter, ComplexOutput,
    GraphBreak, BranchOnValue, WritesItsOutput, WritesItsInput, SharedMemory, ReturnsItsInput,
    ReturnsAWeight, Nested, Batchnorm, Frozen, CustomFunction, WeightFunction,
]  # fmt: skip


def total(out: Any) -> Tensor:
    """A loss of everything a model returned."""
    leaves = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)]
    return sum((t.abs().square().mean() for t in leaves), torch.zeros(())) * 1e-4


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("needs_grad", [False, True], ids=["", "input too"])
def test_gradients_of(make: Callable[[], nn.Module], needs_grad: bool) -> None:
    plain = make()
    model = copy.deepcopy(plain)
    amp_graph.convert(model, policy="float16")
    outs, inputs = [], []
    for each in (plain, model):
        for _ in range(2):
            leaf = X.clone().requires_grad_(needs_grad)
            out = each(leaf * 1.0)
            total(out).backward()
        outs.append(out)
        inputs.append(leaf)
    assert all(not plan.fallback for plan in amp_graph.plans(model))
    a, b = (torch.utils._pytree.tree_leaves(out) for out in outs)
    for value, reference in zip(b, a, strict=True):
        if isinstance(value, Tensor):
            assert distance(value, reference) <= FLOAT16
            assert value.requires_grad is reference.requires_grad
        else:
            assert value == reference
    if needs_grad:
        assert distance(inputs[1].grad, inputs[0].grad) <= FLOAT16
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) is (q.grad is None), name
        if q.grad is not None:
            assert p.grad.dtype is q.grad.dtype
            assert distance(p.grad, q.grad) <= FLOAT16, name
    for p, q in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("write", ["mul_", "index", "relu_", "out="])
def test_the_user_may_write_into_the_output(write: str) -> None:
    plain, model = twins(Mlp(), SCALED)
    for each in (plain, model):
        out = each(X)
        if write == "mul_":
            out.mul_(3)
        elif write == "index":
            out[:, 0] = 0
        elif write == "relu_":
            F.relu_(out)
        else:
            torch.add(out.detach(), 1, out=out.detach())
        out.square().mean().backward()
    assert_same_gradients(model, plain)


class CharModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, num_layers=2)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        out, state = self.lstm(x, state)
        return self.head(out), state


@pytest.mark.parametrize("detach", [True, False], ids=["truncated", "whole"])
def test_backpropagation_through_time(detach: bool) -> None:
    plain, model = twins(CharModel(), SCALED)
    data = torch.randn(12, 3, 4)
    for each in (plain, model):
        optimizer = SGD(each.parameters(), lr=0.5, momentum=0.9)
        state, losses = None, []
        for chunk in data.split(4):
            if state is not None and detach:
                state = tuple(s.detach() for s in state)
            out, state = each(chunk, state)
            losses.append(out.square().mean())
            if detach:
                optimizer.zero_grad()
                losses[-1].backward()
                nn.utils.clip_grad_norm_(each.parameters(), 0.25)
                optimizer.step()
        if not detach:
            sum(losses).backward()
    assert_same_gradients(model, plain, within=2 * FLOAT16)  # as many roundings as steps in time
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert distance(p, q) <= FLOAT16


@pytest.mark.parametrize("overflows", [False, True])
def test_sparse_embedding_gradients(overflows: bool) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4, sparse=True)
            self.head = nn.Linear(4, 2)

        def forward(self, i: Tensor) -> Tensor:
            return self.head(self.table(i))

    plain, model = twins(Bag(), SCALED)
    optimizers = [
        (SparseAdam(m.table.parameters(), lr=0.1, eps=1e-3), SGD(m.head.parameters(), lr=0.1))
        for m in (plain, model)
    ]
    amp = model.table.weight
    for step in range(3):
        for each, both in zip((plain, model), optimizers, strict=True):
            each.zero_grad()
            each(torch.tensor([1, 1, 5, step])).square().mean().backward()
            assert each.table.weight.grad.is_sparse
            bad = overflows and step == 1
            if bad and each is model:
                amp.grad._values()[0, 0] = torch.inf
            before = amp.detach().clone()
            if not (bad and each is plain):
                both[0].step()
            if bad and each is model:
                assert torch.equal(amp.detach(), before)
            both[1].step()
    dense = [m.table.weight.grad.to_dense() for m in (model, plain)]
    if not overflows:
        assert distance(*dense) <= FLOAT16
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert distance(p, q) <= FLOAT16
