"""The way back from code under autocast to the user's own, if it cannot run so."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from amp_graph.capture.surroundings import in_a_transform
from amp_graph.errors import NO_FAILURES, ConversionWarning, in_words
from amp_graph.modules import Run
from amp_graph.snapshots import ModelSnapshot


def or_else(
    run: Run,
    make_other: Callable[[], Run],
    report: Callable[[str], None],
    model: nn.Module | None,
    passed_on: set[type[Exception]],
) -> Run:
    """`run` until a call in which it raises: a RuntimeError, as operators do that do not take a
    dtype, a TypeError, as `Tensor.numpy` does, or whatever a library does that checks dtypes. That
    call and all later ones are run by the other one, unless it raises as well: then the error is
    the user's own, and so are all of its class, should it be one for such uses: it is added to
    those that are `passed_on`. A warning of ours, where warnings are errors, is no failure. If it
    is the first call, what it did to `model` is undone before; not so inside of a functorch
    transform, whose values cannot be kept."""
    chosen, has_run, other = run, False, None
    alive: Any = (lambda: None) if model is None else weakref.ref(model)

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal chosen, has_run, other
        if chosen is not run:
            return chosen(*args, **kwargs)
        is_undone = not has_run and not in_a_transform() and (called := alive()) is not None
        snapshot = ModelSnapshot(called) if is_undone else None
        try:
            result = run(*args, **kwargs)
        except Exception as error:
            if isinstance(error, (*NO_FAILURES, ConversionWarning, *passed_on)):
                raise
            kind = type(error)
            reason = in_words(error)
        else:
            has_run = True
            return result
        if snapshot is not None:
            snapshot.restore()
        other = other or make_other()
        try:
            result = other(*args, **kwargs)
        except Exception as error:
            if type(error) is kind and kind not in (RuntimeError, TypeError):
                passed_on.add(kind)
            raise
        if chosen is run:  # else another thread has found that out
            chosen = other
            report(reason)
        return result

    return call
