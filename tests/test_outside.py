"""What is noted of the code that runs outside of graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from amp_graph.calls.outside import OutsideWatch
from amp_graph.oplists import load_lists

X = torch.ones(4, 4)


@pytest.fixture
def watch() -> OutsideWatch:
    return OutsideWatch(load_lists())


def test_allowed_operators_on_float32_are_noted(watch: OutsideWatch) -> None:
    low, double = X.bfloat16(), X.double()
    with watch:
        (X + X).exp(), low @ low, double @ double
        assert not watch.found
        X @ X
    assert watch.found == {"aten.mm.default"} and watch.in_front


def test_what_graphs_run_is_not_noted(watch: OutsideWatch) -> None:
    with watch:
        with watch.paused():
            X @ X
        assert not watch.found
        X @ X
    assert watch.found and not watch.in_front, "there was a graph before"


def test_a_backward_pass_in_between_is_not_noted(watch: OutsideWatch) -> None:
    x = X.clone().requires_grad_()
    with watch.paused():
        y = x @ X
    with watch:
        torch.autograd.grad(y.sum(), x)
    assert not watch.found, "it follows from what ran before, in a graph or not"


class Counts(OutsideWatch):
    """Another mode, nearer to the operators."""

    count = 0

    def __torch_dispatch__(self, *args, **kwargs):
        self.count += 1
        return super().__torch_dispatch__(*args, **kwargs)


def test_a_mode_of_the_user_sees_what_graphs_run_inside_of_one_another(watch: OutsideWatch) -> None:
    with watch, Counts(load_lists()) as mode, watch.paused():
        with watch.paused():
            X @ X
        X @ X
    assert mode.count == 2 and not watch.found


def test_a_graph_runs_under_no_mode(watch: OutsideWatch) -> None:
    with watch, watch.paused():
        assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("first", [X.to_sparse(), X])
def test_sparse_tensors_are_noted_whatever_comes_after(watch: OutsideWatch, first: Tensor) -> None:
    with watch:
        first @ X
        X @ X
    assert watch.met_sparse is (first is not X)
