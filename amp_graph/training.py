"""Optimizers that skip a step whose gradients overflowed.

They are reached through the hooks that PyTorch has for all optimizers, so it does not matter who
made one, when, or who calls it: an optimizer is guarded as soon as it steps a parameter whose
gradients are scaled. That makes two things module-level here, both weak: the scales in use, and
what is known of each optimizer.

A step is skipped in one of three ways, all without a trace in parameters and optimizer state:

- a fused optimizer gets `found_inf`, as from GradScaler, and leaves everything alone on the device;
  the host need not wait to know;
- any other is called on a stand-in that has no parameters (a hook may replace the arguments of the
  call, the optimizer among them);
- one that calls its closure again and again, as LBFGS does, may meet an overflow in the middle of
  its work: parameters and state are put back when it is done.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from amp_graph.errors import CheckpointError
from amp_graph.found_inf import found_inf
from amp_graph.grad_scaler import is_grad_scaler_stepping
from amp_graph.graph_scale import GraphScale
from amp_graph.guarded_closure import GuardedClosure
from amp_graph.loss_scale import load_state

STATE_KEY = "amp_graph"  # in an optimizer's state_dict

_scales: weakref.WeakSet[GraphScale] = weakref.WeakSet()
_guards: weakref.WeakKeyDictionary[Optimizer, StepGuard] = weakref.WeakKeyDictionary()
_hooks: list[Any] = []


@dataclass(frozen=True)
class StepCounts:
    """How often an optimizer stepped, and how often it had to skip."""

    stepped: int
    skipped: int


def step_counts(optimizer: Optimizer) -> StepCounts:
    """An optimizer's steps under a loss scale, those before the checkpoint it was loaded from
    included. Waits for the device."""
    guard = _guards.get(optimizer)
    return guard.counts if guard else StepCounts(0, 0)


def use_scale(scale: GraphScale) -> None:
    """From now on guard all optimizers that step parameters under this scale."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))
    _scales.add(scale)


def drop_scale(scale: GraphScale) -> None:
    """Guard nothing on behalf of this scale any more."""
    _scales.discard(scale)


def attach(optimizer: Optimizer, scale: GraphScale | None) -> None:
    """Guard an optimizer from before its first step: its `state_dict()` holds the scale's state,
    and its `step()` tells whether it stepped."""
    guard = _guard_of(optimizer)
    if scale is not None and scale not in guard.scales(optimizer):
        guard.attached.append(weakref.ref(scale))
    guard.make_step_tell(optimizer)


class StepGuard:
    """What is known of one optimizer. It holds no reference to it."""

    def __init__(self, optimizer: Optimizer):
        self.attached: list[weakref.ref[GraphScale]] = []
        self.stepped: bool | Tensor = True  # the latest step; a tensor if the host does not know
        self.found_inf: Tensor | None = None  # what a fused optimizer was given for this step
        self.closure: GuardedClosure | None = None  # what this step was given
        self.has_state = bool(optimizer.state)
        self.calls_closure_again = True  # until it is seen not to
        self.tells = False
        self._steps, self._skipped = 0, torch.zeros(())
        self._loaded: tuple[list[Any], int, Tensor] | None = None
        optimizer.register_state_dict_post_hook(self._save)
        optimizer.register_load_state_dict_pre_hook(self._check_loaded)
        optimizer.register_load_state_dict_post_hook(self._apply_loaded)

    def scales(self, optimizer: Optimizer) -> list[GraphScale]:
        """The scales that this optimizer's gradients are made under, the oldest first."""
        attached = {scale for ref in self.attached if (scale := ref()) in _scales and scale}
        return sorted(attached.union(_covering(optimizer)), key=lambda scale: scale.serial)

    def record(self, overflowed: bool | Tensor) -> None:
        self._steps += 1
        self._skipped = self._skipped + overflowed
        self.stepped = overflowed == 0 if isinstance(overflowed, Tensor) else not overflowed
        self.has_state = self.has_state or self.stepped is True

    @property
    def counts(self) -> StepCounts:
        skipped = int(self._skipped)
        return StepCounts(self._steps - skipped, skipped)

    def make_step_tell(self, optimizer: Optimizer) -> None:
        """Let `optimizer.step()` return whether it stepped, unless it returns a closure's loss."""
        if self.tells:
            return
        self.tells, step = True, optimizer.step

        @functools.wraps(step)
        def telling(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self.stepped = True
            result = step(*args, **kwargs)
            return self.stepped if result is None else result

        optimizer.step = types.MethodType(telling, optimizer)  # type: ignore[method-assign]

    def _save(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        scales = self.scales(optimizer)
        if scales:
            saved = [scale.state_dict() for scale in scales]
            counts = {"steps": self._steps, "skipped": int(self._skipped)}
            state[STATE_KEY] = {"scales": saved, **counts}

    def _check_loaded(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Raise CheckpointError before anything is changed."""
        saved, scales = state.get(STATE_KEY), self.scales(optimizer)
        self._loaded = None
        if saved is None or not scales:
            return
        try:
            states, steps, skipped = list(saved["scales"]), int(saved["steps"]), saved["skipped"]
            skipped = torch.tensor(float(skipped))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"'{STATE_KEY}' in the optimizer's state is damaged or foreign ({error!r}); "
                f"without that key the loss scale starts anew"
            ) from None
        if len(states) != len(scales):
            raise CheckpointError(
                f"the optimizer's state has {len(states)} loss scales, but {len(scales)} models "
                f"with one are converted; convert all models before loading"
            )
        loaded = [
            (scale, *load_state(scale.config, state))
            for scale, state in zip(scales, states, strict=True)
        ]
        self._loaded = loaded, steps, skipped

    def _apply_loaded(self, optimizer: Optimizer) -> None:
        self.has_state = bool(optimizer.state)
        if self._loaded is not None:
            loaded, self._steps, self._skipped = self._loaded
            for scale, config, state in loaded:
                scale.go_on_from(config, state)


def _guard_of(optimizer: Optimizer) -> StepGuard:
    guard = _guards.get(optimizer)
    if guard is None:
        guard = _guards[optimizer] = StepGuard(optimizer)
    return guard


def _covering(optimizer: Optimizer) -> list[GraphScale]:
    parameters = _parameters(optimizer)
    return [s for s in _scales if any(s.covers(p) for p in parameters)]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Hook: check the gradients; skip the step if they overflowed."""
    if not _scales or (optimizer not in _guards and not _covering(optimizer)):
        return None
    guard = _guard_of(optimizer)
    scales = guard.scales(optimizer)
    explicit = is_grad_scaler_stepping(sys._getframe())
    for scale in scales:
        scale.driven_by_grad_scaler = explicit
    if explicit or not scales:
        return None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if callable(closure):
        return _with_closure(guard, closure, optimizer, scales, args, kwargs)
    found = _check(optimizer, scales)
    if guard.has_state and getattr(optimizer, "_step_supports_amp_scaling", False):
        # Only with state: skipping its very first step, a fused SGD would leave the momentum
        # uninitialised (torch 2.13).
        guard.record(found)
        optimizer.found_inf = guard.found_inf = found  # type: ignore[attr-defined]
        return None
    guard.record(bool(found))
    return ((_idle(optimizer), *args[1:]), kwargs) if not guard.stepped else None


def _with_closure(
    guard: StepGuard,
    closure: Callable[[], Any],
    optimizer: Optimizer,
    scales: Sequence[GraphScale],
    args: Any,
    kwargs: Any,
) -> tuple[Any, Any]:
    def overflows() -> bool:
        return bool(_check(optimizer, scales))

    guarded = GuardedClosure(closure, overflows, optimizer, guard.calls_closure_again)
    guard.closure = guarded
    kwargs = {k: guarded if v is closure else v for k, v in kwargs.items()}
    args = tuple(guarded if a is closure else a for a in args)
    if guarded.overflowed and not guarded.can_put_back:
        args = (_idle(optimizer), *args[1:])
    return args, kwargs


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Hook: take back what `_before_step` had prepared."""
    guard = _guards.get(optimizer)
    if guard is None:
        return
    if guard.found_inf is not None:
        optimizer.__dict__.pop("found_inf", None)
        guard.found_inf = None
    closure, guard.closure = guard.closure, None
    if closure is not None:
        guard.record(closure.overflowed)
        guard.calls_closure_again = closure.calls > 1
        if closure.overflowed and closure.can_put_back:
            closure.put_back(optimizer)


def _check(optimizer: Optimizer, scales: Sequence[GraphScale]) -> Tensor:
    """Whether any gradient overflowed, and tell each scale of its own parameters' gradients."""
    parameters = _parameters(optimizer)
    if len(scales) == 1:
        found = found_inf(parameters)
        scales[0].stepped(found)
        return found
    of_all = found_inf(p for p in parameters if not any(s.covers(p) for s in scales))
    for scale in scales:
        found = found_inf(p for p in parameters if scale.covers(p))
        scale.stepped(found)
        of_all = torch.maximum(found, of_all.to(found.device))
    return of_all


def _idle(optimizer: Optimizer) -> Optimizer:
    """A stand-in for an optimizer whose step does nothing, for want of parameters."""
    idle = object.__new__(type(optimizer))
    idle.__dict__.update(optimizer.__dict__)
    idle.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    return idle
