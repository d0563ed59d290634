"""The `step` that a guarded optimizer has in its own `__dict__`."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


def bound_step(step: Callable[..., Any], optimizer: Optimizer) -> Any:
    """Bind a step to an optimizer, in whose own `__dict__` it may be: it does not keep the
    optimizer alive. An Optimizer leaves it out of its copies and pickles; other objects get their
    class's step there."""
    if isinstance(optimizer, Optimizer):
        return types.MethodType(step, weakref.proxy(optimizer))
    return _BoundStep(step, optimizer)


class _BoundStep:
    def __init__(self, step: Callable[..., Any], optimizer: object):
        functools.update_wrapper(self, step)
        self._step, self._optimizer = step, weakref.ref(optimizer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(self._optimizer(), *args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self._optimizer(), "step")
