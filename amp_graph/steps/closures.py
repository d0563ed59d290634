"""A closure whose every evaluation is checked, and finding it among a step's arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Overflows = Callable[[], bool | None]


class GuardedClosure:
    """A closure whose every evaluation is checked; after one that overflowed nothing more is
    evaluated.

    overflows: whether the gradients of an evaluation overflowed; None if they were made under no
        loss scale.
    is_first: whether a step is known to begin with a call of its closure, and not to move the
        weights before, as SAM does, or hooks may. The closure is then evaluated at once: if that
        overflows, the step need not begin.
    """

    def __init__(self, closure: Callable[..., Any], overflows: Overflows, is_first: bool):
        self._closure = closure
        self._overflows = overflows
        self.overflowed = False
        self.is_scaled = False  # any evaluation so far
        self.loss: Any = None
        self.is_first = is_first
        self._is_ahead = is_first
        if self._is_ahead:
            self._evaluate()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._is_ahead or self.overflowed):
            self._evaluate(*args, **kwargs)
        self._is_ahead = False
        return self.loss

    def _evaluate(self, *args: Any, **kwargs: Any) -> None:
        with torch.enable_grad():
            self.loss = self._closure(*args, **kwargs)
        found = self._overflows()
        self.is_scaled |= found is not None
        self.overflowed = bool(found)


def closure_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return the closure among a step's arguments: the first of them, or `closure`."""
    closure = kwargs.get("closure", args[0] if args else None)
    return closure if callable(closure) else None


def guarding_closure(
    args: Sequence[Any], kwargs: Mapping[str, Any], overflows: Overflows, is_first: bool
) -> tuple[GuardedClosure, Sequence[Any], Mapping[str, Any]]:
    """Return the closure among a step's arguments, guarded, and the arguments with it in place."""
    closure = closure_of(args, kwargs)
    assert closure is not None
    guarded = GuardedClosure(closure, overflows, is_first)
    if "closure" in kwargs:
        return guarded, args, {**kwargs, "closure": guarded}
    return guarded, (guarded, *args[1:]), kwargs
