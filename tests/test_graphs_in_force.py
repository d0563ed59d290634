"""Views show the graphs that calls run: none that was captured anew since, or is run no more."""

from __future__ import annotations

import pytest
import torch
from test_explain import Mixed

import amp_graph
from amp_graph import ConversionWarning
from amp_graph.capture.budget import MAX_CAPTURES

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_what_was_captured_anew_is_counted_once() -> None:
    model, x = amp_graph.convert(Mixed(), policy="bfloat16"), torch.randn(4, 8)
    model(x)
    first = amp_graph.explain(model).data
    model.first.register_forward_hook(lambda module, args, result: None)
    model(x)
    again = amp_graph.explain(model).data
    assert len(amp_graph.plans(model)) == 2  # both, for a run that is to go as this one did
    assert [graph.name for graph in again.graphs] == ["graph1"]
    assert again.modules[0] == first.modules[0]
    assert len(again.casts) == len(first.casts) and again.suggestions == first.suggestions
    model(torch.randn(6, 8))  # beside what is captured for four rows
    assert [graph.name for graph in amp_graph.explain(model).data.graphs] == ["graph1", "graph2"]


def test_what_ran_before_counts_until_there_is_something_new() -> None:
    """Of the call that would have captured it, the user's mistake is all that is left."""
    model, x = amp_graph.convert(Mixed(), policy="bfloat16"), torch.randn(4, 8)
    model(x)
    first = amp_graph.explain(model).data
    model.first.register_forward_hook(lambda module, args, result: None)
    with pytest.raises(RuntimeError, match="shapes"):
        model(x[:, :5])
    again = amp_graph.explain(model).data
    assert again.graphs == first.graphs and again.modules == first.modules


def test_graphs_that_no_call_runs_any_more_are_not_counted() -> None:
    class Growing(Mixed):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(len(self.seen))
            return super().forward(x)

    model, x = amp_graph.convert(Growing(), policy="bfloat16"), torch.randn(4, 8)
    for _ in range(3):
        model(x)
    assert len(amp_graph.explain(model).data.graphs) == 3  # each for a length of the list
    with pytest.warns(ConversionWarning, match="captured anew again and again"):
        for _ in range(MAX_CAPTURES):
            model(x)
    (left,) = amp_graph.explain(model).data.graphs
    assert left.nodes == 0 and left.fallback is not None
