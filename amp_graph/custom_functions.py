"""Custom autograd functions in code that runs under autocast.

Nothing casts in their backward passes. There, one that is written for float32 would multiply
gradients in low precision, those of what it made under autocast, by float32 tensors that it had
kept: an error, in a script that never asked for autocast. So a function that is not made for
autocast gets what it would get without: float32, and autocast is off. That autocast is off there
is not a region of the model's own: graphs that are captured inside of a function are rewritten as
elsewhere. What the function writes into an argument reaches the one that its caller
has. What a checkpoint in such code runs again, in a backward pass, does all this again.

Not documented by PyTorch, and used here; seen to work on 2.11 and 2.13 to 2.15: that
`Function.apply` may be replaced. Private:

    torch.utils.checkpoint._checkpoint_without_reentrant_generator (2.14: ..._impl)
                                                        is given what runs again
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils import checkpoint

from amp_graph.capture import autocast_regions
from amp_graph.capture.made_for_autocast import is_made_for_autocast
from amp_graph.modules import Run
from amp_graph.outer_autocast import autocast_devices
from amp_graph.snapshots import version_of
from amp_graph.uncaptured import capturing, never_captured, passed_over

APPLY: Any = Function.__dict__["apply"]  # of all classes
GENERATOR = "_checkpoint_without_reentrant_generator"  # that, or since 2.14 what it calls
GENERATOR += "_impl" if hasattr(checkpoint, f"{GENERATOR}_impl") else ""


@dataclass
class _UnderAutocast:
    """One run of code under autocast.

    in_float32: the functions that ran in float32, apart from those inside of what Dynamo captures.
    depth: how many custom functions are running, nested.
    later: to be called when none is running any more.
    """

    in_float32: set[str] = field(default_factory=set)
    depth: int = 0
    later: Callable[[], None] | None = None


class _Here(threading.local):
    run: _UnderAutocast | None = None  # that this thread is in


_here = _Here()
_of_ours = never_captured(reason="amp_graph runs a custom function without autocast")


@contextlib.contextmanager
def as_without_autocast(in_region: bool = False) -> Iterator[set[str]]:
    """Have custom functions that this thread runs under autocast get what they would get without
    it.

    To be entered where autocast was not put by the script, or (`in_region`) was by the model's own
    region. Yields the names of functions that ran in float32.
    """
    _hear_all()
    before, around = _here.run, None if in_region else autocast_regions.begin()
    _here.run = _UnderAutocast()
    try:
        yield _here.run.in_float32
    finally:
        if around is not None:
            autocast_regions.end(around)
        _here.run = before


def behind_functions(do: Callable[[], None]) -> None:
    """Call `do` as soon as this thread is in no custom function that such code calls."""
    if (run := _here.run) is not None and run.depth:
        run.later = do
    else:
        do()


@functools.cache
def _hear_all() -> None:
    @functools.wraps(Function.apply)
    @passed_over
    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        plain = APPLY.__get__(None, cls)
        if _here.run is None:
            return plain(*args, **kwargs)
        if cls is checkpoint.CheckpointFunction:
            args = (_again(args[0]), *args[1:])
        shield, given = _enter(_here.run, cls, args, capturing() is not None)
        with shield:
            return plain(*given, **kwargs)

    Function.apply = classmethod(apply)  # type: ignore[assignment]
    generator = getattr(checkpoint, GENERATOR)

    @functools.wraps(generator)
    @passed_over
    def generate(fn: Run, *args: Any, **kwargs: Any) -> Any:
        return generator(fn if _here.run is None else _again(fn), *args, **kwargs)

    setattr(checkpoint, GENERATOR, generate)


@passed_over
def _again(run: Run) -> Run:
    """Wrap what a checkpoint runs again. It is under autocast then, too, but not under
    `as_without_autocast`."""
    in_region = autocast_regions.is_in_region()

    @passed_over
    def again(*args: Any, **kwargs: Any) -> Any:
        if _here.run is not None:
            return run(*args, **kwargs)
        with as_without_autocast(in_region):
            return run(*args, **kwargs)

    return again


@_of_ours
def _enter(
    run: _UnderAutocast, function: type[Function], args: Sequence[Any], captures: bool
) -> tuple[contextlib.ExitStack, Sequence[Any]]:
    """Return what has to be left when the function has run, and the arguments it gets. `captures`:
    whether Dynamo captures what it calls."""
    shield, kinds = contextlib.ExitStack(), _casting_devices()
    run.depth += 1
    shield.callback(_leave, run)
    if not kinds or is_made_for_autocast(function, kinds):
        return shield, args
    if not captures:
        run.in_float32.add(function.__name__)
    for kind in kinds:
        shield.enter_context(torch.autocast(kind, enabled=False))
    shield.callback(autocast_regions.end, autocast_regions.begin())
    given = [*map(_widened, args)]
    copies = [
        (arg, wide, version_of(wide))
        for arg, wide in zip(args, given, strict=True)
        if wide is not arg
    ]
    if copies:
        shield.callback(_write_back, copies)
    return shield, given


@_of_ours
def _write_back(copies: Sequence[tuple[Tensor, Tensor, int | None]]) -> None:
    """Write what the function wrote into its arguments into those that its caller has."""
    for arg, wide, version in copies:
        if version is None or version_of(wide) != version:
            arg.copy_(wide)


@passed_over
def _leave(run: _UnderAutocast) -> None:
    run.depth -= 1
    if not run.depth and run.later is not None:
        _do_later(run, run.later)


@_of_ours
def _do_later(run: _UnderAutocast, later: Callable[[], None]) -> None:
    run.later = None
    later()


def _casting_devices() -> list[str]:
    return [kind for kind in autocast_devices() if torch.is_autocast_enabled(kind)]


def _widened(value: Any) -> Any:
    """Return a tensor that is in autocast's low precision in float32, and anything else as it
    is."""
    if not isinstance(value, Tensor):
        return value
    kind = value.device.type
    is_low = kind in autocast_devices() and value.dtype is torch.get_autocast_dtype(kind)
    return value.float() if is_low else value
