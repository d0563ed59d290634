"""The guards that stand before optimizers which step parameters under a loss scale.

Optimizers are reached through the hooks that PyTorch has for all of them, so it does not matter who
made one, when, or who calls it: an optimizer is guarded from the first time that it steps a
parameter whose gradients are scaled. That makes three things module-level here: the scales in use
and the guard of each optimizer, both weak, and, while an optimizer is in the middle of its step,
what scales a closure that calls a model for the first time may bring into use.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from amp_graph.errors import AmpGraphError, in_brief
from amp_graph.gradients.found_inf import parameters_of
from amp_graph.optimizers.step_guard import StepGuard
from amp_graph.optimizers.step_record import STATE_KEY, StepCounts
from amp_graph.scaling.blame import overflowed
from amp_graph.scaling.graph_scale import GraphScale
from amp_graph.steps.closures import closure_of
from amp_graph.steps.hooks import hear_steps
from amp_graph.steps.inner_passes import is_pytorchs
from amp_graph.uncaptured import not_compiled
from amp_graph.weak_references import living

_scales: weakref.WeakValueDictionary[int, GraphScale] = weakref.WeakValueDictionary()
_guards: weakref.WeakKeyDictionary[Optimizer, StepGuard] = weakref.WeakKeyDictionary()
_expected: list[Callable[[Sequence[Tensor]], bool]] = []


def use_scale(scale: GraphScale) -> None:
    """Guard, from now on, all optimizers that step parameters under this scale."""
    hear_steps(before=_before_step, after=_after_step)
    _scales[scale.serial] = scale
    for optimizer in living(_guards.keyrefs()):
        guard = _guards[optimizer]
        if guard.record.is_waiting and scale.parameters.among(parameters_of(optimizer)):
            scale.has_optimizer = True
            guard.record.begin_scale(optimizer, scale)


@contextlib.contextmanager
def scales_expected(are_for: Callable[[Sequence[Tensor]], bool]) -> Iterator[None]:
    """Expect, within, that models are converted in the middle of a step: by a closure, which calls
    them for the first time. `are_for`: whether gradients of such parameters would be scaled then.
    """
    hear_steps(before=_before_step, after=_after_step)
    _expected.append(are_for)
    try:
        yield
    finally:
        _expected.remove(are_for)


def drop_scale(scale: GraphScale) -> None:
    """Guard nothing on behalf of this scale any more."""
    _scales.pop(scale.serial, None)


def attach(optimizer: Optimizer, scale: GraphScale | None, conversion: object) -> None:
    """Guard an optimizer from before its first step: its `state_dict()` holds the scale's state,
    and its `step()` tells whether it stepped, for as long as there is such a conversion."""
    guard = _guard_of(optimizer)
    guard.conversions.add(conversion)
    if scale is not None:
        scale.has_optimizer = True
        guard.attached.append(weakref.ref(scale))
        guard.record.begin_scale(optimizer, scale)


def before_load(optimizer: Optimizer, state: Any) -> None:
    """Prepare an optimizer that is about to load a state. If the state holds scales, they are for
    the models whose parameters it will be seen to step."""
    if isinstance(state, Mapping) and STATE_KEY in state:
        _guard_of(optimizer)


def detach(optimizer: Optimizer, conversion: object) -> None:
    """Count one conversion less. After the last the optimizer's `step()` returns what it always
    did."""
    guard = _guard_of(optimizer)
    guard.conversions.discard(conversion)
    guard.attached = [ref for ref in guard.attached if (scale := ref()) and scale.serial in _scales]


def step_counts(optimizer: Optimizer) -> StepCounts:
    """Return an optimizer's steps under a loss scale, those before the checkpoint it was loaded
    from included. Waits for the device. Raises AmpGraphError for an object that is no optimizer,
    nor was given to `convert` as one."""
    try:
        guard = _guards.get(optimizer)
    except TypeError:  # there are no weak references to it
        guard = None
    if guard is None and not isinstance(optimizer, Optimizer):
        raise AmpGraphError(f"this is for a torch.optim.Optimizer, not {in_brief(optimizer)}")
    return guard.record.counts if guard else StepCounts(0, 0)


def _guard_of(optimizer: Optimizer) -> StepGuard:
    guard = _guards.get(optimizer)
    if guard is None:
        guard = _guards[optimizer] = StepGuard(optimizer, _in_use, _closure_may_scale)
    return guard


def _in_use() -> list[GraphScale]:
    return living(_scales.valuerefs())


def _closure_may_scale(optimizer: Optimizer) -> bool:
    """Whether gradients that a closure makes may be made under a scale. The models it will call are
    not known."""
    if any(scale.is_on() for scale in _in_use()):
        return True
    return _are_expected(optimizer)


def _are_expected(optimizer: Optimizer) -> bool:
    parameters = parameters_of(optimizer) if _expected else ()
    return any(are_for(parameters) for are_for in _expected)


def _concerns_a_scale(optimizer: Optimizer) -> bool:
    """Whether gradients are made under a scale that this step uses."""
    in_use = _in_use()
    stepped = parameters_of(optimizer) if in_use else ()
    return any(s.may_have_spilled(optimizer, False) or s.parameters.among(stepped) for s in in_use)


def _may_call_a_model(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step may itself call a model that is converted then, and gets a
    scale."""
    return bool(_expected) and not is_pytorchs(optimizer) and _are_expected(optimizer)


def overflowed_by_hand(parameters: Sequence[Tensor], scale: GraphScale | None, by: object) -> bool:
    """Whether a gradient of these parameters overflowed, which are to be updated without an
    optimizer."""
    own = [] if scale is None else [scale]
    for each in own:
        each.driven_by_grad_scaler = False  # that of another model
    spilling = [s for s in _in_use() if s is not scale and s.may_have_spilled(by)]
    asked = {each: each.parameters.among(parameters) for each in (*own, *spilling)}
    return bool(overflowed(parameters, asked, by))


@not_compiled
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    if not (_scales or _expected):
        return None
    guard = _guards.get(optimizer)
    if guard is None:
        has_closure = closure_of(args[1:], kwargs) is not None
        concerns = _closure_may_scale if has_closure else _concerns_a_scale
        if not (concerns(optimizer) or _may_call_a_model(optimizer)):
            return None
        guard = _guard_of(optimizer)
    return None if guard.is_stepping else guard.before_unguarded_step(optimizer, args, kwargs)


@not_compiled
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    guard = _guards.get(optimizer)
    if guard is not None and not guard.is_stepping:
        guard.after_unguarded_step(optimizer, args, kwargs)
