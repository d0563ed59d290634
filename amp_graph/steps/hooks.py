"""The steps of optimizers: hooks for all, which stay once there is need of them; steps among the
frames of a call; and the `step` that a guarded optimizer has in its own `__dict__`."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from itertools import islice
from types import FrameType
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from amp_graph.callers import calling

After = Callable[[Optimizer, Any, Any], None]
Before = Callable[[Optimizer, Any, Any], tuple[Any, dict[str, Any]] | None]
# The code in which PyTorch calls steps and their hooks.
HOOKED_STEP = Optimizer.profile_hook_step(Optimizer.step).__code__


@functools.cache
def hear_steps(*, before: Before | None = None, after: After) -> None:
    """Call these at each step of an optimizer from now on, once however often they are given.
    `before` returns the arguments that the step is called with."""
    if before is not None:
        register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def steps_around(frame: FrameType | None, enough: int | None = 1) -> int:
    """Return how many steps there are, of whichever optimizers, counted up to `enough` if that is
    given."""
    steps = filter(_is_step, calling(frame))
    return sum(1 for _ in islice(steps, enough))


def _is_step(frame: FrameType) -> bool:
    code = frame.f_code
    # Dynamo changes both code and name.
    return code.co_filename == HOOKED_STEP.co_filename and HOOKED_STEP.co_name in code.co_name


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
