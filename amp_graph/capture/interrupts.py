"""Interrupts (Ctrl-C, a notebook's stop button) wait until a capture is over.

While Dynamo captures, PyTorch's C++ calls back into Python where it expects no error: a
KeyboardInterrupt there ends the process (`terminate called after throwing python_error`), or leaves
a fake mode or a library half registered behind, so that each later call fails (torch 2.13).
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

PATIENCE = 2  # so many interrupts are not held: a capture can take minutes


class _Holding:
    """A handler that holds interrupts for another, `script`, which is the script's."""

    def __init__(self, script: Any) -> None:
        self.script, self.held = script, 0

    def __call__(self, number: int, frame: object) -> None:
        self.held += 1
        if self.held >= PATIENCE:
            self.held = 0
            self.script(number, frame)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold interrupts, within, and handle one on exit as the script has it. Where no Python handler
    would run, in other threads, say, or interrupts are held already, nothing is changed."""
    script = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(script) or isinstance(script, _Holding):
        yield
        return
    holding = _Holding(script)
    signal.signal(signal.SIGINT, holding)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is holding:
            signal.signal(signal.SIGINT, script)
        if holding.held:
            script(signal.SIGINT, sys._getframe())
