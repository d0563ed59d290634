"""Runs under other modes than those around them: autocast, the recording of gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from amp_graph.custom_functions import as_without_autocast
from amp_graph.dtypes import LOW
from amp_graph.modules import Run
from amp_graph.outer_autocast import autocast_depth, autocast_devices
from amp_graph.results import Given

BeginAt = Callable[[Callable[[], None]], contextlib.AbstractContextManager[Any]]


def under_autocast(
    run: Run,
    device_types: Iterable[str],
    dtype: torch.dtype,
    keeps_casts: bool = True,
    begin_at: BeginAt | None = None,
    tell: Callable[[str], None] | None = None,
) -> Run:
    """`run`, under autocast: what is called where no graph could be rewritten. Low-precision
    results come back in float32, those that it puts into its arguments as well.

    keeps_casts: a weight is cast once for all that read it, as autocast does of itself. What was
        written into the weight meanwhile, through `.data`, is not seen then (torch 2.13).
    begin_at: is entered around the run, with what turns autocast on, if that is not to be done at
        its beginning.
    tell: is told, once, the name of each custom function that runs in float32.
    """
    told: set[str] = set()
    kinds = [kind for kind in device_types if kind != "meta"]

    def autocast(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(
                    torch.autocast(kind, dtype, begin_at is None, cache_enabled=keeps_casts)
                )
            in_float32 = stack.enter_context(as_without_autocast())
            if begin_at is not None:
                stack.enter_context(begin_at(turn_on))
            given = Given((args, kwargs))
            result = given.map_tensors(back, run(*args, **kwargs))
        if tell is not None:
            for name in sorted(in_float32 - told):
                told.add(name)
                tell(name)
        return result

    def turn_on() -> None:
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)

    def back(value: torch.Tensor) -> torch.Tensor:  # cuDNN's layers run in float16 in any case
        return value.float() if value.dtype in LOW else value

    return autocast


def restoring_modes(run: Run) -> Run:
    """`run`, which turns recording and autocast off and on again, raises under the modes that it
    was called under."""

    def restoring(*args: Any, **kwargs: Any) -> Any:
        records, casts = torch.is_grad_enabled(), _CastingModes()
        try:
            return run(*args, **kwargs)
        except BaseException:
            torch.set_grad_enabled(records)
            casts.restore()
            raise

    return restoring


class _CastingModes:
    """Autocast as it is now."""

    def __init__(self) -> None:
        self._modes = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in autocast_devices()
        ]
        self._caches = torch.is_autocast_cache_enabled()
        self._depth = autocast_depth()

    def restore(self) -> None:
        for kind, is_enabled, dtype in self._modes:
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._caches)
        while autocast_depth() > self._depth:
            torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
