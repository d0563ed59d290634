"""Models that a script makes anew without end, none of which is worth a capture."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from amp_graph import is_converted
from amp_graph.autopatch.first_call import PATIENCE, SHORT_LIVED
from amp_graph.capture.budget import MAX_CAPTURES, REPAID_BY

X = torch.ones(2, 8)


def new_net() -> nn.Module:
    """Of a class of its own, so that nothing that was captured of another holds for it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    return Net()


def run(calls: int) -> nn.Module:
    model = new_net()
    for _ in range(calls):
        model(X)
    return model


def test_models_that_do_not_live_long_are_captured_no_more(start, capsys):
    start()
    converted = [is_converted(run(1)) for _ in range(2 * MAX_CAPTURES + 8)]
    assert converted.index(False) > MAX_CAPTURES and not any(converted[converted.index(False) :])
    line = f"amp_graph: Net is left as it is: {SHORT_LIVED.format(PATIENCE)}\n"
    assert capsys.readouterr().err.count(line) == 1


def test_one_that_lives_longer_is_captured_later(start):
    start()
    while is_converted(run(1)):
        pass
    model = new_net()
    for _ in range(PATIENCE):
        assert torch.equal(model(X), nn.functional.linear(X, model.layer.weight, model.layer.bias))
        assert not is_converted(model)
    model(X)
    assert is_converted(model)


def test_those_whose_calls_repay_it_are_captured_for_ever(start):
    start()
    assert all(is_converted(run(REPAID_BY + 1)) for _ in range(2 * MAX_CAPTURES))


def test_long_captures_count_for_several(start, monkeypatch):
    monkeypatch.setattr("amp_graph.autopatch.script_models.SECONDS", 1e-6)
    start()
    assert [is_converted(run(1)) for _ in range(4)] == [True, True, False, False]


@pytest.mark.parametrize("is_busy", [False, True])
def test_calls_repay_no_captures_that_take_most_of_the_time(start, monkeypatch, is_busy):
    """Else a wrapper that is made anew at each step may be captured for ever."""
    clock = SimpleNamespace(process_time=lambda: (1e6 if is_busy else 1.0) * time.process_time())
    monkeypatch.setattr("amp_graph.autopatch.script_models.LONG", 1e-6)
    monkeypatch.setattr("amp_graph.autopatch.script_models.time", clock)
    start()
    converted = [is_converted(run(2 * PATIENCE)) for _ in range(4)]
    assert converted == [True, True, *[is_busy] * 2]


def test_one_that_lives_longer_than_all_of_them_is_captured(start, monkeypatch):
    monkeypatch.setattr("amp_graph.autopatch.script_models.LONG", 1e-6)
    start()
    while is_converted(run(PATIENCE)):
        pass
    assert not is_converted(run(2 * PATIENCE))
    assert is_converted(run(2 * PATIENCE + 1))


class Fold(nn.Linear):
    """Of which each is called by what was captured of the first one."""


def test_one_long_capture_does_not_leave_those_alone_that_it_serves(start, monkeypatch):
    monkeypatch.setattr("amp_graph.autopatch.script_models.SECONDS", 1e-6)
    installation = start()
    for _ in range(4):
        model = Fold(8, 2)
        model(X)
        assert is_converted(model)
        del model
    assert sum(m.record.cost.models for m in installation.models.seen) == 1


@pytest.mark.parametrize("clock", ["perf_counter", "thread_time"])
def test_captures_are_long_by_what_the_processor_works(start, monkeypatch, clock):
    """Not by the clock of a machine that others keep busy."""
    clocks = {name: getattr(time, name) for name in ("perf_counter", "thread_time")}
    fast = clocks | {clock: lambda: 1e6 * clocks[clock]()}
    monkeypatch.setattr("amp_graph.capture.budget.time", SimpleNamespace(**fast))
    start()
    converted = [is_converted(run(1)) for _ in range(4)]
    assert converted == [True, True, *[clock == "perf_counter"] * 2]


def test_one_of_another_name_is_captured(start):
    start()
    while is_converted(run(1)):
        pass
    other = nn.Sequential(nn.Linear(8, 2))
    other(X)
    assert is_converted(other)


def test_the_layers_of_a_model_that_is_called_layer_by_layer_all_live(start):
    start()
    layers = [new_net() for _ in range(2 * MAX_CAPTURES)]
    for layer in layers:
        layer(X)
    assert all(map(is_converted, layers))
