"""Explicit scalers, ours or PyTorch's: models under one do not scale inside their graphs.

That there is one in the process is known by its constructor, which notes it from the first question
on and goes on doing so; that it steps, by the frames of the call.
"""

from __future__ import annotations

import functools
import gc
import weakref
from types import FrameType
from typing import Any

import torch

from amp_graph.scaling.grad_scaler import GradScaler
from amp_graph.weak_references import living

EXPLICIT = (GradScaler, torch.amp.GradScaler)
STEPS = GradScaler.step.__code__, torch.amp.GradScaler.step.__code__
STEP_DEPTH = 16  # frames between a scaler's step() and an optimizer's hooks, wrappers included


def is_grad_scaler_stepping(frame: FrameType | None) -> bool:
    """Whether the call in this frame comes from an enabled scaler's `step`."""
    for _ in range(STEP_DEPTH):  # not by `calling`, a generator: each step asks this
        if frame is None:
            return False
        if frame.f_code in STEPS:
            return bool(frame.f_locals["self"].is_enabled())
        frame = frame.f_back
    return False


_around: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by id


def is_grad_scaler_around() -> bool:
    """Whether the process holds an enabled scaler. Those that are there when it is first asked are
    found among all objects, in tens of milliseconds; later ones are noted as they are made."""
    _note_all()
    return any(map(_is_enabled, living(_around.valuerefs())))


def _is_enabled(scaler: Any) -> bool:
    try:
        return bool(scaler.is_enabled())
    except AttributeError:  # its `__init__` is not there yet, or raised
        return False


@functools.cache
def _note_all() -> None:
    for kind in EXPLICIT:
        kind.__new__ = staticmethod(functools.partial(_noted, kind))  # type: ignore[method-assign]
    # By type(): isinstance() would ask proxies for their __class__, which may run anything.
    _around.update((id(o), o) for o in gc.get_objects() if issubclass(type(o), EXPLICIT))


def _noted(base: type, kind: type, *args: Any, **kwargs: Any) -> Any:
    """In place of `base.__new__`. `__init__` is left alone: it warns of the place that called
    it."""
    scaler: Any = super(base, kind).__new__(kind)  # type: ignore[arg-type]
    _around[id(scaler)] = scaler
    return scaler
