"""Where graphs are cut, for gradients that a model takes by values of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_inner_gradients import Energy, Forces, Held, Imported, Pair, Parts
from torch import Tensor, nn
from two_layers import Two, X

import amp_graph
from amp_graph.convert import record_of
from amp_graph.dynamo_changes.inner_gradients import cuts, takes_gradients

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_each_part_has_a_plan_and_the_break_is_told_once() -> None:
    model = amp_graph.convert(Forces(), policy="bfloat16")
    model(X)
    low = [sum("linear" in part for part in plan.low) for plan in amp_graph.plans(model)]
    assert [count for count in low if count] == [1, 1]
    breaks = record_of(model).breaks
    assert len(breaks) == len(set(breaks))


def test_models_that_take_no_gradients_stay_whole() -> None:
    model = amp_graph.convert(Pair(), policy="bfloat16")
    model(X)
    assert len(amp_graph.plans(model)) == 1


@pytest.mark.parametrize(
    ("kind", "taken"),
    [(Energy, True), (Imported, True), (Held, True), (Parts, True), (Pair, False), (Two, False)],
)
def test_whose_code_takes_gradients(kind: type[nn.Module], taken: bool) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = kind()

    assert takes_gradients(Around()) is taken


def whole(function: Any, *args: Tensor) -> torch.fx.Graph:
    """The graph that Dynamo captures of a function."""
    found: list[torch.fx.Graph] = []

    def keep(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        found.append(graph.graph)
        return graph.forward

    torch.compile(function, backend=keep, fullgraph=True)(*args)
    return found[0]


def test_as_few_cuts_as_do() -> None:
    x = X.clone().requires_grad_()
    assert len(cuts(whole(lambda x: (h := x * 2, h.sin()), x))) == 1
    assert not cuts(whole(lambda x: (x.cos(), x.sin()), x))
    assert not cuts(whole(lambda x: (h := x * 2, h.detach().sin()), x))
    columns = whole(lambda x: (a := x[:, :1], b := x[:, 1:], torch.cat([a, b], 1).sin()), x)
    assert [node.name for node in cuts(columns)] == ["cat"]
    chain = whole(lambda x: (a := x * 2, b := a.sin(), b.cos()), x)
    assert len(cuts(chain)) == 2
