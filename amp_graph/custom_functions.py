"""Custom autograd functions in code that runs under autocast.

Nothing casts in their backward passes. There, one that is written for float32 would multiply
gradients in low precision, those of what it made under autocast, by float32 tensors that it had
kept: an error, in a script that never asked for autocast. So a function that is not made for
autocast gets what it would get without: float32, and autocast is off. It is made for it if
`torch.amp.custom_fwd` decorates it, for the kind of device, or if it is PyTorch's.

Not documented by PyTorch, and used here; seen to work on 2.11, 2.13 and 2.14: that `Function.apply`
may be replaced, and that what `custom_fwd` returns is a closure with a `device_type`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from amp_graph.modules import autocast_devices, without_autocast
from amp_graph.uncaptured import passed_over

APPLY: Any = Function.__dict__["apply"]  # of all classes
CUSTOM_FWD = torch.amp.custom_fwd.__code__.co_filename  # what it decorates has its code from there


class _Here(threading.local):
    depth = 0  # of runs in which this thread is


_here = _Here()


@contextlib.contextmanager
def as_without_autocast() -> Iterator[None]:
    """For what this thread runs under autocast, where no script has put that."""
    _hear_all()
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1


@functools.cache
def _hear_all() -> None:
    @functools.wraps(Function.apply)
    @passed_over
    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        kinds = _casting_devices() if _here.depth else ()
        if not kinds or _is_made_for_autocast(cls, kinds):
            return APPLY.__get__(None, cls)(*args, **kwargs)
        return without_autocast(APPLY.__get__(None, cls), kinds)(*map(_widened, args), **kwargs)

    Function.apply = classmethod(apply)  # type: ignore[assignment]


def _casting_devices() -> list[str]:
    return [kind for kind in autocast_devices() if torch.is_autocast_enabled(kind)]


def _is_made_for_autocast(function: type[Function], kinds: Collection[str]) -> bool:
    if function.__module__.startswith(("torch.", "amp_graph.")):
        return True
    forward: Any = inspect.unwrap(function.forward, stop=_is_decorated)
    if not _is_decorated(forward):
        return False
    closure = dict(zip(forward.__code__.co_freevars, forward.__closure__, strict=True))
    return closure["device_type"].cell_contents in kinds


def _is_decorated(forward: Any) -> bool:
    code = getattr(forward, "__code__", None)
    return code is not None and code.co_filename == CUSTOM_FWD


def _widened(value: Any) -> Any:
    """A tensor in the precision of the autocast that is on in float32."""
    if not isinstance(value, Tensor):
        return value
    kind = value.device.type
    is_low = kind in autocast_devices() and value.dtype is torch.get_autocast_dtype(kind)
    return value.float() if is_low else value
