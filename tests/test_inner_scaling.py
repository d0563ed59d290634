"""Graphs that are compiled scale their gradients inside, and the gradients are true."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled import COMPILE_FX, assert_close, compiled, count
from torch import Tensor, nn
from torch.optim import SGD
from training import FLOAT16, Mlp, X, assert_same_gradients, distance, twins

import amp_graph
from amp_graph.boundary.inner_scaling import ENTER, LEAVE

IDS = torch.arange(12).view(3, 4) % 11

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo", "no_other_scales"),
    pytest.mark.filterwarnings("error::amp_graph.ConversionWarning"),
]


class Words(nn.Module):
    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        if is_tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(ids)))


class Several(nn.Module):
    """Returns a loss in float32, what it was made of, twice, and what carries no gradient, of
    floats and of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Mlp(8, 4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.body(x)
        y = self.head(h)
        return y.square().mean(), y, h, y, h.detach().sum(), y.argmax(1)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


class Frozen(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


class Rotated(nn.Module):
    """With a part that is not recorded, as rotary embeddings are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            angles = self.first(x).sin()
        return self.last(torch.tanh(self.first(x)) * angles)


MODELS = {
    "mlp": (Mlp, X, 4),
    "tied words": (lambda: Words(True), IDS, 2),
    "words": (lambda: Words(False), IDS, 2),
    "several results": (Several, X, 6),
    "batch norm": (Normed, X, 5),
    "frozen": (Frozen, X, 4),
    "not recorded in part": (Rotated, X, 4),
}


def loss_of(result: Any) -> Tensor:
    parts = result if isinstance(result, tuple) else (result,)
    return sum(part.float().square().mean() for part in parts if part.requires_grad)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("has_optimizer", [False, True])
def test_gradients_are_scaled_inside_and_true(name, has_optimizer, graphs) -> None:
    make, x, entering = MODELS[name]
    plain, model = twins(make())
    compiled(amp_graph.restore(model), loss_scale=2.0**10)
    if has_optimizer:
        SGD(model.parameters(), lr=0.0).step()
    for step in range(2):
        for each in (plain, model):
            each.zero_grad()
            torch.manual_seed(step)
            loss_of(each(x)).backward()
        assert_same_gradients(model, plain, 2 * FLOAT16)
    assert count(graphs, ENTER) == entering * len(graphs)
    assert count(graphs, LEAVE) >= len(graphs)
    results, expected = model(x), plain(x)
    if name == "several results":
        assert results[1] is results[3] and results[2].dtype is torch.float32
        assert [r.requires_grad for r in results] == [r.requires_grad for r in expected]


@pytest.mark.parametrize("has_optimizer", [False, True])
def test_gradients_that_float16_cannot_hold_are_there(has_optimizer, graphs) -> None:
    """2**-26 times a gradient of about 1 is nothing in float16."""
    plain, model = twins(Mlp())
    compiled(amp_graph.restore(model))
    if has_optimizer:
        SGD(model.parameters(), lr=0.0).step()
    x, y = (X.clone().requires_grad_() for _ in range(2))
    (plain(x).mean() * 2.0**-26).backward()
    (model(y).mean() * 2.0**-26).backward()
    assert_same_gradients(model, plain)
    assert distance(y.grad, x.grad) <= FLOAT16
    assert count(graphs, ENTER) == 5


class ReturnsAView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return y, y[1:]


class ReturnsAWeight(ReturnsAView):
    def forward(self, x: Tensor) -> Any:
        return self.linear(x), self.linear.weight[1:]


class WritesIntoABuffer(ReturnsAView):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8, 4))

    def forward(self, x: Tensor) -> Any:
        self.seen = self.seen.detach()
        self.seen.copy_(self.linear(x))
        return self.seen * 2


@pytest.mark.parametrize("make", [ReturnsAView, ReturnsAWeight, WritesIntoABuffer])
def test_what_shares_memory_with_something_outside_is_scaled_there(make, graphs) -> None:
    plain, model = twins(make())
    compiled(amp_graph.restore(model), loss_scale=2.0**10)
    for each in (plain, model):
        loss_of(each(X)).backward()
    assert_same_gradients(model, plain)
    assert graphs and not count(graphs, ENTER) + count(graphs, LEAVE)


@pytest.mark.filterwarnings("error:The .grad attribute")
def test_parameters_that_were_computed(graphs) -> None:
    plain, model = twins(Mlp())
    compiled(amp_graph.restore(model))
    sources = [{k: p.detach().requires_grad_() for k, p in plain.named_parameters()} for _ in "12"]
    for each, source in zip((plain, model), sources, strict=True):
        computed = {k: p * 2 for k, p in source.items()}
        torch.func.functional_call(each, computed, (X,)).square().mean().backward()
    for name, expected in sources[0].items():
        assert distance(sources[1][name].grad, expected.grad) <= FLOAT16
    assert count(graphs, ENTER)


def test_what_cannot_be_compiled_runs_by_operator_with_the_same_gradients(monkeypatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("no C++ here")

    monkeypatch.setattr(COMPILE_FX, fail)
    plain, model = twins(Several())
    with pytest.warns(amp_graph.ConversionWarning, match="no C\\+\\+ here"):
        compiled(amp_graph.restore(model))(X)
    for each in (plain, model):
        each.zero_grad()
        loss_of(each(X)).backward()
    assert_same_gradients(model, plain)


def test_evaluation_is_unscaled_and_the_same(graphs) -> None:
    plain, model = twins(Mlp())
    compiled(amp_graph.restore(model))
    with torch.no_grad():
        assert_close(model(X), plain(X), FLOAT16)
    with torch.inference_mode():
        assert_close(model(X), plain(X), FLOAT16)
    model(X).square().mean().backward()
    plain(X).square().mean().backward()
    assert_same_gradients(model, plain)
