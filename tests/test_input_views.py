"""Results of scaled graphs that are views of inputs, and writes into either."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from training import FLOAT16, assert_same_gradients, distance

import amp_graph

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("error::amp_graph.ConversionWarning"),
]
X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
new_graph = torch._dynamo.graph_break


class Model(nn.Module):
    def __init__(self, run: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.run = nn.Linear(4, 4), run
        self.factor = nn.Parameter(torch.tensor(0.8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.run(self, x), self.layer(x + 0)


def a_view(model: Model, x: Tensor) -> Tensor:
    return x[:2].t()


def itself(model: Model, x: Tensor) -> Tensor:
    return x.view_as(x)


def of_what_was_written(model: Model, x: Tensor) -> Tensor:
    x.mul_(model.factor)
    return x[1:]


def written_in_many_graphs(model: Model, x: Tensor) -> Tensor:
    view = x.view(8, 2)
    new_graph()
    view[:, :1].zero_()
    new_graph()
    x.add_(model.factor)
    new_graph()
    view.mul_(2)
    return view


def written_as_base_and_as_view(model: Model, x: Tensor) -> Tensor:
    part = x[1:3]
    new_graph()
    x.mul_(model.factor)
    before = part * 2
    part.add_(model.factor)
    return before + part


RUNS = [a_view, itself, of_what_was_written, written_in_many_graphs, written_as_base_and_as_view]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
@pytest.mark.parametrize("written", ["nothing", "the result", "the input"])
def test_views_of_inputs(run: Callable[[Model, Tensor], Tensor], written: str) -> None:
    plain = Model(run)
    model = amp_graph.convert(copy.deepcopy(plain), policy="float16")
    found = []
    for each in (plain, model):
        leaf = X.clone().requires_grad_()
        x = leaf * 2
        view, y = each(x)
        if written != "nothing":
            (view if written == "the result" else x).mul_(3)
        (view.sum() * 2 + y.square().sum() + x.sin().sum()).backward()
        found.append((leaf.grad, x.detach(), view.detach()))
    assert all(distance(a, b) <= FLOAT16 for a, b in zip(found[1], found[0], strict=True))
    assert_same_gradients(model, plain)


def test_an_input_comes_back_as_it_is() -> None:
    model = amp_graph.convert(Model(a_view), policy="float16")
    x = X.clone().requires_grad_() * 2
    view, _ = model(x)
    assert view._base is x and view.data_ptr() == x.data_ptr()


class Returns(nn.Module):
    """Its results are a parameter, as calls that do nothing leave it, and views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            same = self.weight.contiguous()
        y = torch.tanh(self.layer(x)) @ same.to(x.device)
        return y, same, self.weight.t(), self.weight[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_parameter_leaves_as_it_is(dtype: str) -> None:
    model = amp_graph.convert(Returns(), policy=dtype)
    y, same, turned, row = model(X)
    assert same is model.weight and same.is_leaf
    assert turned._base is model.weight and row._base is model.weight
    (gradient,) = torch.autograd.grad(y.sum() + row.sum(), [same])
    plain = amp_graph.restore(model)
    y, same, _, row = plain(X)
    (expected,) = torch.autograd.grad(y.sum() + row.sum(), [same])
    assert distance(gradient, expected) <= (FLOAT16 if dtype == "float16" else 8 * FLOAT16)
