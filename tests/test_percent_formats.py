"""Text that is made by `%` of numbers that depend on data ends a graph only where it is shown."""

# ruff: noqa: UP031 (percent formats are what is tested)

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_graph
from amp_graph.convert import record_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Net(nn.Module):
    """`use` is what the model does with a value."""

    def __init__(self, use: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.body, self.head, self.use = nn.Linear(8, 8), nn.Linear(8, 2), use
        self.said, self.calls, self.rate = [], 0, 1.0  # type: list[str], int, float
        self.layers = nn.ModuleDict({"part 0": nn.Linear(8, 8), "part 1": nn.Linear(8, 8)})

    def forward(self, x: Tensor) -> Tensor:
        self.calls, self.rate = self.calls + 1, self.rate * 0.9
        h = self.body(x).relu()
        found = self.use(self, h)
        return self.head(h if found is None else found)


def count(h: Tensor) -> int:
    return int((h > -1).sum().item())


KEPT: dict[str, Callable[[Any, Tensor], Any]] = {
    "a number": lambda net, h: net.said.append("%d of them" % count(h)),
    "several": lambda net, h: net.said.append("%d: %s %.2f" % (net.calls, h.shape, net.rate)),
    "by name": lambda net, h: net.said.append("%(found)d" % {"found": count(h)}),
    "as an attribute": lambda net, h: setattr(net, "last", "%d" % count(h)),
}
SHOWN: dict[str, Callable[[Any, Tensor], Any]] = {
    "printed": lambda net, h: print("%d, %.1f" % (count(h), h.shape[0])),
    "warned of": lambda net, h: warnings.warn("%d of them" % count(h), UserWarning, stacklevel=2),
    "asked for": lambda net, h: h * 2 if "%d" % count(h) == "32" else h,
    "a name": lambda net, h: net.layers["part %d" % (net.calls % 2)](h),
}


def pair(use: Callable[[Any, Tensor], Any]) -> tuple[Net, Net]:
    torch.manual_seed(0)
    plain = Net(use)
    return plain, amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")


def call(plain: Net, model: Net) -> None:
    for seed in range(5):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(model(x), plain(x), rtol=0.05, atol=0.05)
    assert model.said == plain.said
    assert getattr(model, "last", "") == getattr(plain, "last", "")


@pytest.mark.parametrize("use", KEPT.values(), ids=KEPT.keys())
@pytest.mark.filterwarnings("error::amp_graph.ConversionWarning")
def test_it_ends_no_graph(use: Callable[[Any, Tensor], Any]) -> None:
    plain, model = pair(use)
    call(plain, model)
    assert all(len(plan.facts) > 4 for plan in amp_graph.plans(model))
    assert not record_of(model).breaks


@pytest.mark.parametrize("use", SHOWN.values(), ids=SHOWN.keys())
@pytest.mark.filterwarnings("error::amp_graph.ConversionWarning", "ignore:.*of them")
def test_where_it_is_shown_the_model_is_captured_around_it(
    use: Callable[[Any, Tensor], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    plain, model = pair(use)
    call(plain, model)
    assert any(plan.casts for plan in amp_graph.plans(model))
    said = capsys.readouterr().out.splitlines()
    assert said[::2] == said[1::2]
