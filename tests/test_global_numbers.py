"""Integers that a model reads outside of itself, and that change from call to call."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import amp_graph

CALLS = 8
X = torch.linspace(-1, 1, 32).reshape(4, 8)

step = 0
settings = SimpleNamespace(step=0)
storages = [SimpleNamespace(step=0)]
counts = {"step": 0}

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Net(nn.Module):
    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)


class ReadsGlobal(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * 2 if step % 3 == 0 else self.layer(x) * step


class ReadsWhatGlobalsHold(Net):
    def forward(self, x: Tensor) -> Tensor:
        warmth = min(1.0, settings.step / 10)
        return self.layer(x) * warmth + storages[-1].step * counts["step"]


class ReadsItsClass(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * ReadsItsClass.steps


class TakesSizes(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[:, : step + 1] + torch.arange(step + 1)


class ReturnsIt(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.layer(x), step


class Counts(Net):
    def forward(self, x: Tensor) -> Tensor:
        global step
        step += 1
        settings.step += 1
        return self.layer(x) * step + settings.step


def set_all(value: int) -> None:
    global step
    step = settings.step = storages[0].step = counts["step"] = ReadsItsClass.steps = value


@pytest.mark.parametrize(
    "kind",
    [
        ReadsGlobal,
        ReadsWhatGlobalsHold,
        pytest.param(
            ReadsItsClass,
            marks=pytest.mark.skipif(
                torch.__version__ < "2.13", reason="Dynamo does not look at classes again"
            ),
        ),
        TakesSizes,
    ],
)
def test_a_changing_integer_outside_of_the_model_is_not_captured_each_time(kind: type[Net]) -> None:
    torch.manual_seed(0)
    plain = kind()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    counters.clear()
    for value in range(CALLS):
        set_all(value)
        torch.testing.assert_close(model(X), plain(X), rtol=2e-2, atol=2e-2)
    assert counters["frames"]["total"] <= 4


def test_what_a_model_returns_or_counts_outside_is_an_ordinary_integer() -> None:
    set_all(0)
    returns, counting = (amp_graph.convert(k(), policy="bfloat16") for k in (ReturnsIt, Counts))
    counters.clear()
    for value in range(CALLS):
        assert step == settings.step == value
        result = returns(X)[1]
        assert type(result) is int
        assert result == value
        counting(X)
        assert type(step) is type(settings.step) is int
    assert counters["frames"]["total"] <= 6
