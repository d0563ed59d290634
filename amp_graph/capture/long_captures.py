"""Say that a capture goes on, while it does: a loop over time steps is captured step by step, for
minutes if there are thousands, and the call that waits for it prints nothing meanwhile."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from amp_graph.errors import say

LONG = 30.0  # seconds of capturing a model that are worth a word


@contextlib.contextmanager
def told_of(name: str, before: float) -> Iterator[None]:
    """Say, within, as soon as capturing this model has taken LONG, of which `before` seconds have
    passed. It is no warning: in a thread that is not the user's it would have no line, and raise
    where warnings are errors."""
    told = (
        f"{name} has been captured for {LONG:.0f} s, and that goes on: an operator takes a "
        "millisecond or more, once, and a loop is captured step by step"
    )
    timer = threading.Timer(LONG - before, say, [told])
    timer.daemon = True
    if before < LONG:
        with contextlib.suppress(RuntimeError):  # no thread can be had
            timer.start()
    try:
        yield
    finally:
        timer.cancel()
