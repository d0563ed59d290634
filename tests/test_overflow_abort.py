"""After too many skipped steps in a row: who is to blame, and how training goes on."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from planted import Planted
from torch import Tensor, nn
from torch.optim import SGD
from training import Mlp, X, overflow

import amp_graph
from amp_graph import LossScale, OverflowAbort, Policy, StepCounts

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X8 = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


class Exploding(nn.Module):
    """Its second block makes values, or gradients, that are not finite."""

    def __init__(self, where: str):
        super().__init__()
        self.where = where
        self.blocks = nn.ModuleList([Mlp(outputs=4), Mlp(outputs=4), Mlp()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:2]:
            x = block(x)
        if self.where == "gradient":
            x = torch.sqrt(x.detach() * 0 + x - x)  # finite, of infinite slope
        return self.blocks[2](x)


def steps_until_abort(
    model: nn.Module, limit: int, x: Tensor = X, loss: Callable[..., Tensor] = Tensor.sum
) -> tuple[int, str]:
    optimizer = SGD(model.parameters(), lr=0.1)
    policy = Policy("float16", loss_scale=LossScale(abort_after=5))
    amp_graph.convert(model, optimizer, policy=policy)
    for step in range(limit):
        model.zero_grad()
        try:
            loss(model(x)).backward()
            optimizer.step()
        except OverflowAbort as abort:
            return step, str(abort)
    return limit, ""


@pytest.mark.parametrize(
    ("weight", "what"),
    [(6e4, "linear"), (1e6, "weight")],
    ids=["sums too large", "weight beyond float16"],
)
def test_abort_names_the_operator_whose_value_was_not_finite(weight: float, what: str) -> None:
    model = Exploding("value")
    with torch.no_grad():
        model.blocks[1].first.bias.fill_(10.0)  # so that all of its tanh are 1
        model.blocks[1].second.weight.fill_(weight)
    steps, message = steps_until_abort(model, 20)
    assert steps <= 7, "soon after the fifth skipped step; one more is looked into"
    assert "blocks.1.second" in message and what in message
    assert "value" in message and "in a row" in message and "loss scale" in message
    assert "Keep that operator in float32" in message


class Logarithm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(self.layer(x) * 0)


def test_abort_does_not_advise_float32_for_what_is_in_float32() -> None:
    _, message = steps_until_abort(Logarithm(), 20)
    assert "aten.log" in message and "That operator is in float32" in message
    assert "Policy.overrides" not in message


def test_abort_names_the_operator_whose_gradient_was_not_finite() -> None:
    steps, message = steps_until_abort(Exploding("gradient"), 20)
    assert steps <= 7
    assert "gradient" in message and "test_overflow_abort.py" in message


class ReturnsFeatures(nn.Module):
    """A network whose features, which it returns as well, get an infinite gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        nn.init.constant_(self.last.weight, 1e3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = torch.relu(self.first(x))
        return features, self.last(features)


def test_abort_names_a_result_that_leaves_the_graph_early() -> None:
    model = ReturnsFeatures()
    _, message = steps_until_abort(model, 20, loss=lambda results: results[1].sum())
    assert "module 'last'" in message and "gave for aten.relu" in message


class Masked(nn.Module):
    """Attention whose mask is infinite, and a product beyond float16 after it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        ahead = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        weights = (self.query(x) @ x.T).masked_fill(ahead, -math.inf).softmax(-1)
        return self.last(weights @ x * 1e6)


def test_an_abort_names_no_mask() -> None:
    """Its infinity is a number that the operator was given."""
    model = Masked()
    with torch.no_grad():
        model.last.weight.fill_(1.0)
    _, message = steps_until_abort(model, 20)
    assert "masked_fill" not in message and "test_overflow_abort.py" in message, message


@pytest.mark.parametrize(
    ("inputs", "factor", "what"),
    [(math.nan, 1.0, "value .* which came into a graph"), (1.0, math.nan, "gradient .* the loss")],
    ids=["data", "loss"],
)
def test_an_abort_tells_what_came_from_outside(inputs: float, factor: float, what: str) -> None:
    """No operator is to blame for it, nor does float32 help."""
    model = Mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    amp_graph.convert(
        model, optimizer, policy=Policy("float16", loss_scale=LossScale(abort_after=2))
    )

    def train() -> None:
        for _ in range(8):
            model.zero_grad()
            (model(X * inputs).sum() * factor).backward()
            optimizer.step()

    with pytest.raises(OverflowAbort, match=what) as raised:
        train()
    assert "look at the data and at the loss" in str(raised.value)
    assert "a cast" not in str(raised.value) and "Policy.overrides" not in str(raised.value)


LOSSES = {"loss": lambda y: (y - y).sqrt().sum(), "returned": lambda y: (y[1] * 0).sqrt().sum()}


class Returning(Planted):
    """Also what goes wrong."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layers[0](x)
        return self.layers[1](x), x


@pytest.mark.parametrize(
    ("fault", "phase", "operator"),
    [
        ("overflow", "value", "aten.mul.Tensor"),
        ("overflow in place", "value", "aten.mul_.Tensor"),
        ("slope", "gradient", "aten.mul.Tensor"),
        ("slope of one reader", "gradient", "aten.mul.Tensor"),
        ("gradient of a weight", "gradient", "aten.linear"),
        ("loss", "gradient", "the loss"),
        ("returned", "gradient", "the loss"),
    ],
)
def test_an_abort_names_the_operator_that_find_nonfinite_does(
    fault: str, phase: str, operator: str
) -> None:
    torch.manual_seed(1)
    model = Returning(fault) if fault == "returned" else Planted(fault)
    loss = LOSSES.get(fault, Tensor.sum)
    found = amp_graph.find_nonfinite(model, X8, loss=loss, loss_scale=2.0**11, policy="float16")
    assert found is not None and operator in (found.operator, found.node)
    _, message = steps_until_abort(model, 8, X8, loss)
    first = rf"first {phase} that was not finite: (what )?{re.escape(operator)}"
    place = "" if operator == "the loss" else rf".* at {re.escape(found.source)}( gave|\.)"
    assert re.search(first + place, message), message
    if fault == "gradient of a weight":
        assert found.value == "layers.3.weight" and f"gave for {found.value}" in message, message


def test_no_abort_without_overflows_in_a_row() -> None:
    model = Mlp()
    optimizer = SGD(model.parameters(), lr=0.01)
    policy = Policy("float16", loss_scale=LossScale(2.0**10, abort_after=3))
    amp_graph.convert(model, optimizer, policy=policy)
    for step in range(24):
        model.zero_grad()
        model(X).square().mean().backward()
        if step % 3:
            overflow(model)
        optimizer.step()
    assert amp_graph.step_counts(optimizer) == StepCounts(8, 16)


def test_after_an_abort_the_model_may_go_on() -> None:
    model = Mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    policy = Policy("float16", loss_scale=LossScale(2.0**10, abort_after=2))
    amp_graph.convert(model, optimizer, policy=policy)

    def overflow_forever() -> None:
        while True:
            model.zero_grad()
            model(X * math.inf).sum().backward()
            optimizer.step()

    with pytest.raises(OverflowAbort):
        overflow_forever()
    model.zero_grad()
    model(X).square().mean().backward()
    assert optimizer.step() is True
    assert all(p.isfinite().all() for p in model.parameters())
