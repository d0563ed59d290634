"""Tensors that require no gradient until a graph writes into them, as buffers filled in pieces."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from training import assert_same_gradients, distance, twins
from two_layers import BFLOAT16, POLICIES, Two, X

import amp_graph
from amp_graph import Policy

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

new_graph = torch._dynamo.graph_break


class Model(Two):
    def __init__(self, run: Callable[[Model, Tensor], Tensor]):
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def filled_in_two_graphs(model: Model, x: Tensor) -> Tensor:
    h = torch.zeros(4, 8)
    new_graph()
    h[:2] = model.a(x)[:2]
    new_graph()
    h[2:] = model.b(x)[2:]
    new_graph()
    return model.b(h) * h


def read_in_another_graph(model: Model, x: Tensor) -> Tensor:
    h = torch.zeros(4, 8)
    new_graph()
    h[:2] = model.a(x)[:2]
    new_graph()
    return model.b(h)


def returned_by_another_graph(model: Model, x: Tensor) -> Tensor:
    h = torch.zeros(4, 8)
    new_graph()
    h += model.a(x)
    new_graph()
    return h


def written_and_returned(model: Model, x: Tensor) -> Tensor:
    h = torch.zeros(4, 8)
    new_graph()
    h += model.a(x)
    return h * 2 + h.view(-1).view(4, 8)


def written_and_a_view_returned(model: Model, x: Tensor) -> Tensor:
    h = torch.zeros(4, 8)
    new_graph()
    view = h[1:]
    h += model.a(x)
    return view


def had_a_gradient(model: Model, x: Tensor) -> Tensor:
    h = model.a(x)
    new_graph()
    h[2:] = model.b(x)[2:]
    new_graph()
    h += model.b(x)
    new_graph()
    return model.b(h)


RUNS = [
    filled_in_two_graphs,
    read_in_another_graph,
    returned_by_another_graph,
    written_and_returned,
    written_and_a_view_returned,
    had_a_gradient,
]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_across_graphs(run: Callable[[Model, Tensor], Tensor], policy: Policy) -> None:
    plain, model = twins(Model(run), policy)
    for each in (plain, model):
        each(X).square().mean().backward()
    assert_same_gradients(model, plain, BFLOAT16)
    assert any(plan.converts for plan in amp_graph.plans(model))


class Fills(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        out += self.layer(x)
        return out.sum()


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_tensor_that_the_caller_gave(policy: Policy) -> None:
    plain, model = twins(Fills(), policy)
    outs = [torch.zeros(4, 8) for _ in range(2)]
    for each, out in zip((plain, model), outs, strict=True):
        total = each(X, out)
        (total + out.square().sum()).backward()
    assert distance(outs[1], outs[0]) <= BFLOAT16
    assert_same_gradients(model, plain, BFLOAT16)
