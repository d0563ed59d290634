"""A capture that takes long says so meanwhile."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import amp_graph
from amp_graph.capture import long_captures

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Steps(nn.Module):
    """A loop, which is captured step by step."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(60):
            x = self.layer(x).tanh()
        return x


def test_it_is_said_once_and_only_while_a_capture_goes_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    quick = amp_graph.convert(Steps(), policy="bfloat16")
    quick(torch.randn(2, 4))
    assert not capfd.readouterr().err
    monkeypatch.setattr(long_captures, "LONG", 0.01)
    slow = amp_graph.convert(Steps(bias=False), policy="bfloat16")
    for rows in (2, 3, 4):  # two captures, the second for sizes that vary
        slow(torch.randn(rows, 4))
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith("amp_graph: Steps has been captured for 0 s, and that goes on")
    slow(torch.randn(4, 4, 4))
    assert not capfd.readouterr().err
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(5)
            assert not thread.is_alive()


def test_capture_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(timer: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", refuse)
    model = amp_graph.convert(Steps(), policy="bfloat16")
    model(torch.randn(2, 4))
    assert amp_graph.plans(model)[0].has_low
