"""One thread goes on while another loads a model, or writes what it reads, as in a server."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from several_threads import SEVERAL_THREADS, Net, X, at_once, beside_it, computing_with, evaluated
from torch import Tensor, _ops, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

import amp_graph
from amp_graph.calls.conversion import restore_all
from amp_graph.convert import convert_at_first_call
from amp_graph.modules import Forwards
from amp_graph.policy import Policy
from amp_graph.weights import store
from amp_graph.weights.store import LowPrecisionWeights

pytestmark = SEVERAL_THREADS


def test_kept_weights_are_stale_until_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads call a model after other weights were loaded into it."""
    parameter = nn.Parameter(X.clone())
    graph = computing_with(LowPrecisionWeights(on_change=True))
    graph(parameter)
    with torch.no_grad():
        parameter.mul_(3)
    beside: list[Tensor] = []
    write = store.copy_all_

    def later(*args: Any) -> None:
        monkeypatch.setattr(store, "copy_all_", write)
        beside.extend(at_once(1, lambda k: graph(parameter).clone()))
        write(*args)

    monkeypatch.setattr(store, "copy_all_", later)
    graph(parameter)
    assert torch.equal(beside[0], parameter.bfloat16())


def captured_with(meanwhile: Callable[[], Any]) -> nn.Module:
    """A model, not yet called, in whose capture something is done between two of its operators."""

    @torch.compiler.allow_in_graph
    def beside(x: Tensor) -> Tensor:
        meanwhile()
        return x.neg()

    class Loaded(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(beside(self.body(x)))

    return evaluated(Loaded)


@torch.no_grad()
def test_a_model_runs_as_ever_while_another_thread_captures() -> None:
    served, results = evaluated(Net), []
    expected = served(X)
    captured_with(lambda: results.append(beside_it(served)))(X)
    assert results and all(torch.equal(result, expected) for result in results)
    assert len(amp_graph.plans(served)) == 1


@torch.no_grad()
def test_modes_of_a_trace_are_not_those_of_another_thread() -> None:
    """The first run of a graph, and Dynamo, lay off modes for a while; PyTorch has one stack for
    all threads of those that a trace above autograd is under."""
    laid_off, is_done = threading.Event(), threading.Event()

    def lay_off() -> None:
        with _disable_current_modes():
            laid_off.set()
            is_done.wait()

    def meanwhile() -> None:
        if _ops.mode_stack_state_for_pre_dispatch().count() and not laid_off.is_set():
            beside.start()
            laid_off.wait()

    stack = _ops.mode_stack_state_for_pre_dispatch
    beside, loaded = threading.Thread(target=lay_off), captured_with(meanwhile)
    loaded(X)
    is_done.set()
    beside.join()
    (plan,) = amp_graph.plans(loaded)
    assert plan.fallback is None and plan.low
    assert _ops.mode_stack_state_for_pre_dispatch is stack and not stack().count()


@torch.no_grad()
def test_a_tracer_gets_the_code_of_its_own_thread() -> None:
    """`make_fx` has the model's own code, in its own precision."""
    model, others = evaluated(Net), []
    expected = model(X)
    exact = amp_graph.restore(copy.deepcopy(model))(X)

    def traced(x: Tensor) -> Tensor:
        others.append(beside_it(model))
        return model(x)

    program = make_fx(traced)(X)
    assert torch.equal(program(X), exact)
    assert torch.equal(others[0], expected) and not torch.equal(exact, expected)


def test_models_are_restored_while_others_are_converted() -> None:
    """By `undo()`, while another thread calls what is converted then."""
    models, policies = (
        [nn.Linear(2, 2) for _ in range(500)],
        (Policy("bfloat16"), Policy("float16")),
    )
    before, is_over = sys.getswitchinterval(), threading.Event()

    def convert() -> None:
        for model in models:
            convert_at_first_call(model, policies[0])
        is_over.set()

    def restore() -> None:
        while not is_over.is_set():
            restore_all(policies[1])

    sys.setswitchinterval(1e-6)
    try:
        assert at_once(2, lambda k: (convert, restore)[k]()) == [None, None]
    finally:
        sys.setswitchinterval(before)
    restore_all(policies[0])
    assert not any(map(amp_graph.is_converted, models))


@torch.no_grad()
def test_what_two_threads_find_changed_is_captured_anew_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One has found it, when another captures anew before it does."""

    class Patched(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    model, results = evaluated(Patched), []
    model(X)
    have_changed = Forwards.have_changed

    def slowly(forwards: Forwards) -> bool:
        found = have_changed(forwards)
        monkeypatch.setattr(Forwards, "have_changed", have_changed)
        results.append(beside_it(model))
        return found

    monkeypatch.setattr(Patched, "forward", lambda self, x: Net.forward(self, x) * 2)
    monkeypatch.setattr(Forwards, "have_changed", slowly)
    results += [model(X) for _ in range(3)]
    assert len(results) == 4 and all(torch.equal(result, results[0]) for result in results)
    assert len(amp_graph.plans(model)) == 2
