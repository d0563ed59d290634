"""Processes that a script starts by multiprocessing.

Nobody is told of one when it starts, so `BaseProcess.start`, which is public, is patched.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.process import BaseProcess

from amp_graph.dynamo_changes.replaced import method_inside


def children_heard(hear: Callable[[], None]) -> AbstractContextManager[None]:
    """In here `hear` is called when a process has started that reports by itself: no daemon."""

    def start(original: Callable[[BaseProcess], None], process: BaseProcess) -> None:
        original(process)
        if not process.daemon:
            hear()

    return method_inside(BaseProcess, "start", start)
