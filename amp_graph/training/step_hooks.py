"""Hooks for the steps of all optimizers, once there is need of them; they stay."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

After = Callable[[Optimizer, Any, Any], None]
Before = Callable[[Optimizer, Any, Any], tuple[Any, dict[str, Any]] | None]


def hear_steps(*, before: Before | None = None, after: After) -> None:
    """Call these at each step of an optimizer from now on, once however often they are given.
    `before` returns the arguments that the step is called with."""
    _register(before, after)


@functools.cache
def _register(before: Before | None, after: After) -> None:
    if before is not None:
        register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
