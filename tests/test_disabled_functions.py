"""Functions that `torch.compiler.disable` keeps out of graphs, as attributes of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.hook: Callable[[], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.hook is not None:
            self.hook()
        return self.second(hidden.relu())


called: list[int] = []


@torch.compiler.disable
def show() -> None:
    called.append(0)


def call(hooks: Sequence[Callable[[], None] | None]) -> tuple[nn.Module, list[int]]:
    """A model with each of these in turn, and how many graphs there were after each call."""
    called.clear()
    model, graphs = amp_graph.convert(Hooked(), policy="bfloat16"), []
    for hook in hooks:
        model.hook = hook
        model(torch.randn(4, 8)).sum().backward()
        graphs.append(len(amp_graph.plans(model)))
    return model, graphs


@pytest.mark.filterwarnings("error::amp_graph.ConversionWarning")
def test_one_may_be_taken_away_and_put_back() -> None:
    for _ in range(2):
        model, graphs = call([show, None, show, None, None, show])
        assert len(called) == 3 and graphs[1] == graphs[-1]
        assert not any(plan.otherwise for plan in amp_graph.plans(model))


@pytest.mark.filterwarnings("error::amp_graph.ConversionWarning")
def test_another_one_in_each_call_is_called_and_nothing_captured_anew() -> None:
    _, graphs = call([torch.compiler.disable(partial(called.append, n)) for n in range(6)])
    assert called == [*range(6)] and graphs[0] == graphs[-1]
