"""Tracebacks of errors in a model's own code, without the frames between it and its call.

    train.py, in <module>                       train.py, in <module>
    conversion.py, in __call__                  conversion.py, in __call__
    captured_calls.py, in __call__        ->    net.py, in forward
    ... Dynamo's entry, and ours again
    net.py, in forward

Private name of PyTorch used here:

    torch._dynamo.eval_frame    by its file
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType

from torch._dynamo import eval_frame

from amp_graph.callers import is_ours


def without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without frames of this package and of Dynamo's entry. One that ends in
    this package, whose error it is, stays whole."""
    steps = [*_steps(trace)]
    if not steps or _is_ours(steps[-1]):
        return trace
    kept = []
    is_between = False
    for step in steps:
        is_decorator = is_between and step.tb_frame.f_code.co_filename == contextlib.__file__
        is_between = is_decorator or _is_ours(step)
        if not is_between:
            kept.append(step)
    short: TracebackType | None = None
    for step in reversed(kept):
        short = TracebackType(short, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return short


def _steps(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_ours(step: TracebackType) -> bool:
    file = step.tb_frame.f_code.co_filename
    return is_ours(file) or file == eval_frame.__file__
