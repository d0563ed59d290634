"""Which optimizers step parameters under a loss scale, and the guards that stand before them.

They are reached through the hooks that PyTorch has for all optimizers, so it does not matter who
made one, when, or who calls it: an optimizer is guarded from the first time that it steps a
parameter whose gradients are scaled. That makes two things module-level here, both weak: the
scales in use, and the guard of each optimizer.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from amp_graph.training.engine import not_compiled
from amp_graph.training.found_inf import parameters_of
from amp_graph.training.graph_scale import GraphScale
from amp_graph.training.step_guard import StepCounts, StepGuard

_scales: weakref.WeakValueDictionary[int, GraphScale] = weakref.WeakValueDictionary()
_guards: weakref.WeakKeyDictionary[Optimizer, StepGuard] = weakref.WeakKeyDictionary()
_hooks: list[Any] = []


def use_scale(scale: GraphScale) -> None:
    """From now on guard all optimizers that step parameters under this scale."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))
    _scales[scale.serial] = scale


def drop_scale(scale: GraphScale) -> None:
    """Guard nothing on behalf of this scale any more."""
    scale.is_in_use = False
    _scales.pop(scale.serial, None)


def attach(optimizer: Optimizer, scale: GraphScale | None) -> None:
    """Guard an optimizer from before its first step: its `state_dict()` holds the scale's state,
    and its `step()` tells whether it stepped."""
    guard = _guard_of(optimizer)
    guard.tells = True
    if scale is not None:
        scale.has_optimizer = True
        guard.attached.append(weakref.ref(scale))


def step_counts(optimizer: Optimizer) -> StepCounts:
    """An optimizer's steps under a loss scale, those before the checkpoint it was loaded from
    included. Waits for the device."""
    guard = _guards.get(optimizer)
    return guard.counts if guard else StepCounts(0, 0)


def _guard_of(optimizer: Optimizer) -> StepGuard:
    guard = _guards.get(optimizer)
    if guard is None:
        guard = _guards[optimizer] = StepGuard(optimizer, _covering)
    return guard


def _covering(optimizer: Optimizer) -> list[GraphScale]:
    parameters = parameters_of(optimizer)
    scales = (ref() for ref in _scales.valuerefs())
    return [scale for scale in scales if scale is not None and scale.own(parameters)]


@not_compiled
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    if not _scales or (optimizer not in _guards and not _covering(optimizer)):
        return None
    guard = _guard_of(optimizer)
    return None if guard.is_stepping else guard.before_unguarded_step(optimizer, args, kwargs)


@not_compiled
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    guard = _guards.get(optimizer)
    if guard is not None and not guard.is_stepping:
        guard.after_unguarded_step(optimizer, args, kwargs)
