"""Interrupts a thread at any instruction, for what another may do just then."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Container
from types import FrameType
from typing import Any


def interrupting(at: int, files: Container[str], other: Callable[[], Any]) -> Any:
    """Has `sys.settrace` do something before instruction number `at` of the code in some files."""
    passed = itertools.count()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(passed) == at:
            sys.settrace(None)
            other()
        return trace

    return trace
