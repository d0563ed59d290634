"""Ctrl-C, or another signal, in the middle of a capture: the capture ends first, then the script is
interrupted."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from nets import low_share
from torch import Tensor, nn

import amp_graph
from amp_graph.capture.held_signals import PATIENCE, signals_held

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X = torch.linspace(-1, 1, 32).reshape(4, 8)


@pytest.fixture(autouse=True)
def pythons_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


class InterruptedWhileCaptured(nn.Module):
    """Interrupts the process while Dynamo captures it, for so many `times`."""

    def __init__(self, times: int, by: int = signal.SIGINT) -> None:
        super().__init__()
        self.layer, self.times, self.by = nn.Linear(8, 8), times, by

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.interrupt()

    @torch.compiler.assume_constant_result
    def interrupt(self) -> int:
        for _ in range(self.times):
            os.kill(os.getpid(), self.by)
        self.times = 0
        return 1


def test_a_model_interrupted_while_it_is_captured_goes_on_in_the_next_call() -> None:
    model = InterruptedWhileCaptured(times=1)
    expected = model.layer(X) + 1
    amp_graph.convert(model, policy="bfloat16")
    with pytest.raises(KeyboardInterrupt):
        model(X)
    assert model.times == 0
    torch.testing.assert_close(model(X), expected, rtol=2e-2, atol=2e-2)
    assert low_share(model, X) == 1


def test_an_interrupt_waits_for_what_dynamo_imports_first(monkeypatch: pytest.MonkeyPatch) -> None:
    imported, optimize = [], torch._dynamo.optimize

    def interrupted_import(*args: Any, **kwargs: Any) -> Any:
        if not imported:
            os.kill(os.getpid(), signal.SIGINT)
            imported.append(True)
        return optimize(*args, **kwargs)

    monkeypatch.setattr(torch._dynamo, "optimize", interrupted_import)
    model = amp_graph.convert(nn.Sequential(nn.Linear(8, 8)), policy="bfloat16")
    with pytest.raises(KeyboardInterrupt):
        model(X)
    assert imported
    assert low_share(model, X) == 1


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("times", [1, 3])
def test_what_other_handlers_raise_is_raised_behind_the_capture(number: int, times: int) -> None:
    def out_of_time(number: int, frame: object) -> None:
        raise TimeoutError(number)

    model = InterruptedWhileCaptured(times, by=number)
    expected = model.layer(X) + 1
    amp_graph.convert(model, policy="bfloat16")
    before = signal.signal(number, out_of_time)
    try:
        with pytest.raises(TimeoutError):
            model(X)
        assert signal.getsignal(number) is out_of_time
    finally:
        signal.signal(number, before)
    torch.testing.assert_close(model(X), expected, rtol=2e-2, atol=2e-2)
    assert low_share(model, X) == 1


def sent_while_held(numbers: list[int], heard: list[int]) -> None:
    with signals_held():
        for number in numbers:
            os.kill(os.getpid(), number)
        assert not heard


def test_all_that_were_held_are_heard() -> None:
    heard: list[int] = []

    def hear(number: int, frame: object) -> None:
        heard.append(number)
        raise TimeoutError(number)

    numbers = [signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2]
    before = [signal.signal(number, hear) for number in numbers]
    try:
        with pytest.raises(TimeoutError):
            sent_while_held(numbers, heard)
        assert sorted(heard) == sorted(numbers)
        assert all(signal.getsignal(number) is hear for number in numbers)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def survived(interrupts: int) -> int:
    """How many of them what is held went on after, before it was interrupted."""
    seen = 0
    try:
        with signals_held():
            for _ in range(interrupts):
                os.kill(os.getpid(), signal.SIGINT)
                seen += 1
    except KeyboardInterrupt:
        return seen
    raise AssertionError("not interrupted")


def test_an_interrupt_is_handled_at_the_end_alone() -> None:
    assert survived(interrupts=1) == 1


def test_whoever_insists_is_heard_at_once() -> None:
    assert survived(interrupts=PATIENCE) == PATIENCE - 1


def test_the_handler_of_a_script_decides() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with signals_held(), signals_held():
            os.kill(os.getpid(), signal.SIGINT)
            assert not heard
        assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_change_no_handler() -> None:
    found: list[object] = []

    def look() -> None:
        with signals_held():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
