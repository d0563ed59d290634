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

PATIENCE = 3  # so many interrupts are not held: a capture can take minutes


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold interrupts, within, and handle one on exit as the script has it. Where no Python handler
    would run, in other threads, say, nothing is changed."""
    script = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(script):
        yield
        return
    held = 0

    def hold(number: int, frame: object) -> None:
        nonlocal held
        held += 1
        if held >= PATIENCE:
            held = 0
            script(number, frame)  # type: ignore[arg-type]

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is hold:
            signal.signal(signal.SIGINT, script)
        if held:
            script(signal.SIGINT, sys._getframe())
