"""Signals (Ctrl-C, a notebook's stop button, an alarm) wait until a capture is over.

While Dynamo captures, PyTorch's C++ calls back into Python where it expects no error: a
KeyboardInterrupt there ends the process (`terminate called after throwing python_error`), or leaves
a fake mode or a library half registered behind, so that each later call fails (torch 2.13). So does
one while it imports what a first capture needs. What another handler raises, as that of a time
limit, is taken for a capture that failed, and what one computes, as the last checkpoint of a job
that is told to end, is computed of fake tensors.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

PATIENCE = 2  # so many interrupts are not held: a capture can take minutes


class _Holding:
    """A handler that holds a signal for another, `script`, which is the script's, up to so many."""

    def __init__(self, script: Any, patience: float) -> None:
        self.script, self.patience, self.held = script, patience, 0

    def __call__(self, number: int, frame: object) -> None:
        self.held += 1
        if self.held >= self.patience:
            self.held = 0
            self.script(number, frame)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Hold signals, within, and handle those that came on exit as the script does. Where no Python
    handler would run, in other threads, say, or a signal is held already, nothing is changed."""
    with contextlib.ExitStack() as held:
        if threading.current_thread() is threading.main_thread():
            for number in signal.valid_signals():
                script = signal.getsignal(number)
                if callable(script) and not isinstance(script, _Holding):
                    held.enter_context(_held(number, script))
        yield


@contextlib.contextmanager
def _held(number: int, script: Any) -> Iterator[None]:
    holding = _Holding(script, PATIENCE if number == signal.SIGINT else math.inf)
    signal.signal(number, holding)
    try:
        yield
    finally:
        if signal.getsignal(number) is holding:
            signal.signal(number, script)
        if holding.held:
            script(number, sys._getframe())
