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

Hook = Callable[[Optimizer, Any, Any], None]


@functools.cache
def hear_steps(after: Hook, before: Hook | None = None) -> None:
    """From now on each step of an optimizer calls these, once however often they are given."""
    if before is not None:
        register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
