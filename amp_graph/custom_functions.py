"""Custom autograd functions in code that runs under autocast.

Nothing casts in their backward passes. There, one that is written for float32 would multiply
gradients in low precision, those of what it made under autocast, by float32 tensors that it had
kept: an error, in a script that never asked for autocast. So a function that is not made for
autocast gets what it would get without: float32, and autocast is off. It is made for it if
`torch.amp.custom_fwd` decorates it, for the kind of device, or if it is PyTorch's. That autocast
is off is no region of the model's own: what Dynamo captures inside of a function is rewritten as
elsewhere. What the function writes into an argument reaches the one that its caller has.

Not documented by PyTorch, and used here; seen to work on 2.11, 2.13 and 2.14: that `Function.apply`
may be replaced, and that what `custom_fwd` returns is a closure with a `device_type`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from amp_graph.capture import own_regions
from amp_graph.modules import autocast_devices
from amp_graph.uncaptured import capturing, never_captured, passed_over

APPLY: Any = Function.__dict__["apply"]  # of all classes
CUSTOM_FWD = torch.amp.custom_fwd.__code__.co_filename  # what it decorates has its code from there


class _Here(threading.local):
    """in_float32: in the run in which this thread is, see below.
    depth: in functions of that run.
    later: to be done when it is in none of them.
    """

    in_float32: set[str] | None = None
    depth = 0
    later: Callable[[], None] | None = None


_here = _Here()
_of_ours = never_captured(reason="amp_graph runs a custom function without autocast")


@contextlib.contextmanager
def as_without_autocast() -> Iterator[set[str]]:
    """For what this thread runs under autocast, where no script has put that. Yields the names of
    functions that ran in float32, and not by what Dynamo captures inside of them."""
    _hear_all()
    before, around = (_here.in_float32, _here.depth, _here.later), own_regions.begin()
    _here.in_float32, _here.depth, _here.later = set(), 0, None
    try:
        yield _here.in_float32
    finally:
        own_regions.end(around)
        _here.in_float32, _here.depth, _here.later = before


def behind_functions(do: Callable[[], None]) -> None:
    """Do this as soon as this thread is in no custom function that such code calls."""
    if _here.depth:
        _here.later = do
    else:
        do()


@functools.cache
def _hear_all() -> None:
    @functools.wraps(Function.apply)
    @passed_over
    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        run = APPLY.__get__(None, cls)
        if _here.in_float32 is None:
            return run(*args, **kwargs)
        shield, given = _enter(cls, args, capturing() is not None)
        with shield:
            return run(*given, **kwargs)

    Function.apply = classmethod(apply)  # type: ignore[assignment]


@_of_ours
def _enter(
    function: type[Function], args: Sequence[Any], captures: bool
) -> tuple[contextlib.ExitStack, Sequence[Any]]:
    """What is to be left when the function has run, and what it is given. `captures`: whether
    Dynamo captures what it calls."""
    shield, kinds = contextlib.ExitStack(), _casting_devices()
    _here.depth += 1
    shield.callback(_leave)
    if not kinds or _is_made_for_autocast(function, kinds):
        return shield, args
    if not captures and _here.in_float32 is not None:
        _here.in_float32.add(function.__name__)
    for kind in kinds:
        shield.enter_context(torch.autocast(kind, enabled=False))
    shield.callback(own_regions.end, own_regions.begin())
    given = [*map(_widened, args)]
    copies = [
        (arg, wide, _version(wide))
        for arg, wide in zip(args, given, strict=True)
        if wide is not arg
    ]
    if copies:
        shield.callback(_write_back, copies)
    return shield, given


@_of_ours
def _write_back(copies: Sequence[tuple[Tensor, Tensor, int | None]]) -> None:
    """What the function wrote into what it was given, into what its caller has."""
    for arg, wide, version in copies:
        if version is None or _version(wide) != version:
            arg.copy_(wide)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


@passed_over
def _leave() -> None:
    _here.depth -= 1
    if not _here.depth and _here.later is not None:
        _do_later(_here.later)


@_of_ours
def _do_later(later: Callable[[], None]) -> None:
    _here.later = None
    later()


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
    """A tensor in the low precision of autocast in float32."""
    if not isinstance(value, Tensor):
        return value
    kind = value.device.type
    is_low = kind in autocast_devices() and value.dtype is torch.get_autocast_dtype(kind)
    return value.float() if is_low else value
