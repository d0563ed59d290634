"""Several threads in one process call one model at once."""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from interrupting import interrupting
from several_threads import SEVERAL_THREADS, Net, X, at_once, beside_it, computing_with, evaluated
from torch import Tensor, nn
from two_layers import Packed

import amp_graph
from amp_graph.calls import captured_calls, first_calls, outside
from amp_graph.calls.outside import OutsideWatch
from amp_graph.capture.budget import MAX_CAPTURES
from amp_graph.weights import store
from amp_graph.weights.store import LowPrecisionWeights

pytestmark = SEVERAL_THREADS


class Broken(Net):
    """Three graphs."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        print(end="")
        return self.head(h * 2 if h.sum() > 0 else h)


def all_equal(results: Sequence[Any], expected: Tensor) -> bool:
    return all(isinstance(r, Tensor) and torch.equal(r, expected) for r in results)


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("count", [8, 32])
def test_what_many_threads_meet_at_once_is_captured_for_all(count: int, is_warm: bool) -> None:
    model = evaluated(Net, is_warm)
    before = len(amp_graph.plans(model))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        results = at_once(count, lambda k: torch.no_grad()(model)(X))
    # Dynamo's own look-up may miss what is there while other threads look: a second one, seldom.
    assert before < len(amp_graph.plans(model)) <= before + 2
    assert not said
    with torch.no_grad():
        assert all_equal(results, model(X))


@pytest.mark.parametrize("is_warm", [False, True])
def test_captures_of_many_threads_are_not_again_and_again(is_warm: bool) -> None:
    """What comes after a graph break each thread may capture."""
    model = evaluated(Broken, is_warm)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        results = at_once(32, lambda k: torch.no_grad()(model)(X))
    assert not said
    with torch.no_grad():
        assert all_equal(results, model(X))


class Remembering(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(self.seen))
        return super().forward(x)


def test_a_thread_for_each_request_does_not_hide_that_each_is_captured() -> None:
    model = evaluated(Remembering)
    with pytest.warns(amp_graph.ConversionWarning, match="captured anew again and again"):
        for _ in range(MAX_CAPTURES):
            at_once(1, lambda k: model(X))


def test_requests_that_fail_cost_the_others_nothing() -> None:
    model = evaluated(Net)
    with torch.no_grad():
        expected = model(X)
    before = len(amp_graph.plans(model))
    wrong = torch.zeros(4, 5)
    results = at_once(8, lambda k: torch.no_grad()(model)(wrong if k % 2 else X))
    assert all_equal(results[::2], expected)
    assert all(isinstance(r, RuntimeError) for r in results[1::2])
    with torch.no_grad():
        assert torch.equal(model(X), expected)
    assert len(amp_graph.plans(model)) <= before + 4


def test_threads_assemble_the_graphs_of_a_copy_once() -> None:
    model = evaluated(Net)
    with torch.no_grad():
        expected = model(X)
    twin = copy.deepcopy(model)
    assert all_equal(at_once(16, lambda k: torch.no_grad()(twin)(X)), expected)
    assert len(amp_graph.plans(twin)) == 1


def test_code_between_graphs_is_told_of_once() -> None:
    model = evaluated(Packed)
    at_once(8, lambda k: torch.no_grad()(model)(X))
    between = [plan for plan in amp_graph.plans(model) if "between graphs" in (plan.fallback or "")]
    assert len(between) == 1


@torch.no_grad()
def test_of_two_first_calls_one_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever one thread is interrupted by a call of another, before it runs the model."""
    ours = captured_calls, first_calls, outside
    files, before = tuple(module.__file__ for module in ours), sys.gettrace()
    watched: list[OutsideWatch] = []
    enter = OutsideWatch.__enter__

    def entered(watch: OutsideWatch) -> OutsideWatch:
        sys.settrace(None)  # it is too late for the other thread
        watched.append(watch)
        return enter(watch)

    monkeypatch.setattr(OutsideWatch, "__enter__", entered)
    evaluated(Net)(X)  # what is captured here serves all
    for at in itertools.count():
        model, others = evaluated(Net), []
        watched.clear()
        sys.settrace(interrupting(at, files, lambda: others.append(beside_it(model))))  # noqa: B023
        model(X)
        sys.settrace(before)
        assert len(watched) == 1, f"at instruction {at}"
        if not others:
            break
    assert at > 20


def test_low_precision_weights_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a graph might write to some, and compute with others."""
    made, make = threading.Barrier(2), store.LowPrecisionWeight

    def slowly(*args: Any) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            made.wait(timeout=0.2)  # for another thread that makes one as well
        return make(*args)

    monkeypatch.setattr(store, "LowPrecisionWeight", slowly)
    parameter = nn.Parameter(X.clone())
    graph = computing_with(LowPrecisionWeights())
    first, second = at_once(2, lambda k: graph(parameter))
    assert first is second and torch.equal(first, parameter.bfloat16())
