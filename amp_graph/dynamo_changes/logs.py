"""Logging and capture: what the model logs, and what PyTorch logs about it.

Dynamo ends a graph at each call of a logger, whether it is heard or not, and leaves a whole frame
uncaptured where that is in a loop. A call that is not heard does nothing, and is left out of what
is captured for as long as that is so.

Private names of PyTorch used here:

    torch._dynamo.config.ignore_logging_functions
    torch._dynamo.symbolic_convert.get_funcname, torch._logging._internal.getArtifactLogger
    torch._dynamo.guards.guards_log, .profile_guard_manager
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch._dynamo.config as dynamo_config
from torch._dynamo import guards, symbolic_convert
from torch._logging._internal import getArtifactLogger

from amp_graph.dynamo_changes.replaced import with_entries

# Loggers that print a traceback where Dynamo cannot capture, before it raises the same; and advice
# on settings where a graph ends, or on labels for the profiler, which graphs leave out; and that it
# knows a function of Python's without the argument that it is given.
CAPTURE_LOGS = (
    "torch._subclasses.fake_tensor",
    "torch._guards",
    "torch._dynamo.variables.tensor",
    "torch._dynamo.variables.builtin",
    "torch._dynamo.variables.ctx_manager",
)

# Logs that say in which function a line stands. Dynamo finds that out for each line which calls an
# operator, heard or not, and parses the whole file for it.
LOCATION_LOGS = [
    getArtifactLogger(symbolic_convert.__name__, name) for name in ("trace_call", "trace_source")
]

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "exception": logging.ERROR,
    "critical": logging.CRITICAL,
}


class UnheardLogs(set[Callable[..., Any]]):
    """The methods of loggers that do nothing, as levels are: a set, for Dynamo to ask."""

    def __init__(self) -> None:
        super().__init__()
        self._left_out: set[tuple[logging.Logger, int]] = set()

    def settings(self) -> Mapping[str, Any]:
        """Return Dynamo's settings for a capture that begins now. What the user has Dynamo ignore
        stays ignored."""
        self.update(dynamo_config.ignore_logging_functions)
        return {"ignore_logging_functions": self}

    def __contains__(self, method: object) -> bool:
        logger, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(logger, logging.Logger) and name in LEVELS:
            is_loggings = getattr(method, "__func__", None) is getattr(logging.Logger, name)
            if is_loggings and not logger.isEnabledFor(LEVELS[name]):
                self._left_out.add((logger, LEVELS[name]))
                return True
        return super().__contains__(method)

    def __reduce__(self) -> tuple[Any, ...]:
        """Dynamo copies its settings for its own records."""
        return set, ([*self],)

    def have_changed(self) -> bool:
        """Whether one that was left out is heard now. To be asked before each call."""
        if not self._left_out:
            return False
        left_out = [*self._left_out]  # to which another thread may add
        heard = [(logger, level) for logger, level in left_out if logger.isEnabledFor(level)]
        self._left_out.difference_update(heard)
        return bool(heard)


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """Without the tracebacks that PyTorch logs where an operator raises on fake tensors."""
    logs = [logging.getLogger(name) for name in CAPTURE_LOGS]
    try:
        for log in logs:
            log.addFilter(_nothing)
        yield
    finally:
        for log in logs:
            log.removeFilter(_nothing)


def locations_untold() -> AbstractContextManager[None]:
    """Without looking for the names of functions that no log will tell."""
    if any(log.isEnabledFor(logging.DEBUG) for log in LOCATION_LOGS):
        return nullcontext()
    return with_entries(vars(symbolic_convert), {"get_funcname": lambda file, line: None})


def guards_untimed() -> AbstractContextManager[None]:
    """Without timing the guards of each graph for a log that nobody hears, for which Dynamo has the
    processor's caches flushed first: a fifth of the first call of a small model."""
    if guards.guards_log.isEnabledFor(logging.DEBUG):
        return nullcontext()
    return with_entries(vars(guards), {"profile_guard_manager": lambda *_: 0.0})


def _nothing(record: logging.LogRecord) -> bool:
    return False


CONTEXTS = (quiet_logs, locations_untold, guards_untimed)
