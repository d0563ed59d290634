"""Which captures are a model's own.

Dynamo counts the frames that it captures for the whole process: those of other threads, of
functions that the user compiles, of converted models inside of a converted model. None of these
makes the graphs of the model beside or around them any worse. Each model has a callback of its own
with Dynamo, which is called for all of its code, after a graph break as well, and for no other.

Private names of PyTorch used here; all were seen to work on 2.11, 2.13 and 2.15:

    torch._dynamo.utils.counters    whether Dynamo was at work, or let the frame be
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch._dynamo.utils import counters


class Frames:
    """How many frames of one model Dynamo has begun to capture."""

    def __init__(self) -> None:
        self.begun = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Around the model's callback, one thread at a time."""
        before = counters["frames"]["total"]
        try:
            yield
        finally:
            self.begun += counters["frames"]["total"] != before
