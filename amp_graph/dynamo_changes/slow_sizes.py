"""Stop a capture that takes too long over sizes that vary.

    levels = [feature.shape[-2:] for feature in features]    of OneFormer, Deformable DETR
    keys = sum(height * width for height, width in levels)

To Dynamo such a size is a long expression in those of the image, rounded in each level. Whatever
the model does with it asks for something of that, which SymPy is to simplify: minutes of it, where
a capture of numbers takes seconds. There is nothing to see by how often it asks, and it asks again
soon. Here the question raises once time is up. Where PyTorch tells who asked, as in the log of
`recompiles`, it is not this file.

Private names of PyTorch used here:

    torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_expr    such a question
    torch.fx.experimental.symbolic_shapes.uninteresting_files       whose frames do not ask it
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from amp_graph import patching


class SizesTakeLong(BaseException):
    """Time is up for a capture. Dynamo and its parts let it pass, as they do an interrupt."""


class _Time(threading.local):
    """When the present capture of a thread is to be over, by `time.thread_time`."""

    is_up = math.inf


_time = _Time()


@contextlib.contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Raise SizesTakeLong, within, at the first question for a size after so much processor time
    of this thread."""
    before, _time.is_up = _time.is_up, time.thread_time() + seconds
    try:
        yield
    finally:
        _time.is_up = before


@contextlib.contextmanager
def untimed() -> Iterator[None]:
    """Count no time, within."""
    before, began = _time.is_up, time.thread_time()
    _time.is_up = math.inf
    try:
        yield
    finally:
        _time.is_up = before + time.thread_time() - began


def _ask(method: Any, sizes: Any, *args: Any, **kwargs: Any) -> Any:
    if time.thread_time() > _time.is_up:
        raise SizesTakeLong
    return method(sizes, *args, **kwargs)


@functools.cache
def _passed_over(method: Callable[[], set[str]]) -> set[str]:
    return method() | {__file__, patching.__file__}


CHANGES = (
    (ShapeEnv, "evaluate_expr", _ask),
    (symbolic_shapes, "uninteresting_files", _passed_over),
)
