"""An optimizer that skips a step whose gradients overflowed, without a trace in its state.

- A fused optimizer gets `found_inf`, as from GradScaler, and leaves everything alone on the device;
  the host need not wait to know.
- Any other is not called.
- One that calls its closure again and again, as LBFGS does, or after it moved the weights, or that
  makes passes without having got a closure (`inner_passes`), may meet an overflow in the middle of
  its work: parameters and state are put back when it is done.

Private names of PyTorch used here:

    torch.optim.optimizer._global_optimizer_pre_hooks    those that run before ours
    Optimizer._opt_called                                what schedulers look at
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from amp_graph.gradients.found_inf import parameters_of
from amp_graph.optimizers.step_record import StepRecord
from amp_graph.scaling.blame import overflowed
from amp_graph.scaling.explicit_scalers import is_grad_scaler_stepping
from amp_graph.scaling.graph_scale import GraphScale
from amp_graph.steps.closures import GuardedClosure, closure_of, guarding_closure
from amp_graph.steps.fused_steps import begin_momentum, is_fused
from amp_graph.steps.hooks import bound_step, steps_around
from amp_graph.steps.inner_passes import (
    InnerPasses,
    is_pytorchs,
    note_step,
    with_passes_before,
)
from amp_graph.steps.undo import Undo
from amp_graph.uncaptured import around_compiled, not_compiled
from amp_graph.weak_references import weak_method

InUse = Callable[[], Iterable[GraphScale]]


@dataclass
class _UnguardedStep:
    """The state, while it is under way, of a step that did not come through its optimizer's guard.

    depth: how many steps it is in the middle of; one may call that of its base class.
    undo: undoes it, if it began with an overflow, or its closure may meet one.
    passes: the passes that it makes itself, if it got no closure and began with no overflow.
    found: False if the gradients that it then began with were made under a scale; else None.
    """

    depth: int = 1
    undo: Undo | None = None
    passes: InnerPasses | None = None
    found: bool | None = None

    def give_up(self) -> None:
        """Clean up: the step raised, or another one began meanwhile."""
        if self.undo is not None:
            self.undo.give_back()
        if self.passes is not None:
            self.passes.leave()


class StepGuard:
    """The guard before one optimizer's `step`. It holds no reference to the optimizer, which may be
    any object with a `step` and `param_groups`, such as a wrapper.

    in_use: returns the scales in use, the oldest first.
    closure_may_scale: whether a closure's work may be done under one, in use or not.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        in_use: InUse,
        closure_may_scale: Callable[[Optimizer], bool],
    ):
        self.attached: list[weakref.ref[GraphScale]] = []
        # Those it was given to; if there are any, step() returns whether it stepped.
        self.conversions: weakref.WeakSet[Any] = weakref.WeakSet()
        self.is_stepping = False
        self.record = StepRecord(optimizer, weak_method(self.scales))
        self._in_use, self._closure_may_scale = in_use, closure_may_scale
        self._is_wrapped = False  # whether there is more to its step than its class's
        self._left_over: bool | Tensor = False  # what the step before could not step by
        self._unguarded: _UnguardedStep | None = None  # that is under way
        self._makes_passes = False  # in its steps, for which it got no closure
        self._stand_before(optimizer)

    def _stand_before(self, optimizer: Optimizer) -> None:
        own, alive = optimizer.step, weakref.ref(optimizer)
        original = weak_method(own) if getattr(own, "__self__", 0) is optimizer else own
        # By which schedulers tell, and warn, that no step came before theirs; 2.11 - 2.15.
        knows_schedulers = hasattr(own, "_wrapped_by_lr_sched")
        self._is_wrapped = "step" in vars(optimizer) and not knows_schedulers
        self._may_make_passes = self._is_wrapped or not is_pytorchs(optimizer)

        @around_compiled
        @functools.wraps(getattr(own, "__func__", own))
        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            optimizer = alive()
            if optimizer is None:
                raise ReferenceError("a step of an optimizer that is gone: keep it, not its step")
            self._begin(None)
            if knows_schedulers:
                optimizer._opt_called = True  # type: ignore[attr-defined]
            before, self.is_stepping = self.is_stepping, True
            try:
                result = self._step(optimizer, original, args, kwargs)
            finally:
                self.is_stepping = before
            return self.record.has_stepped if result is None and self.conversions else result

        optimizer.step = bound_step(step, optimizer)  # type: ignore[method-assign]

    def _begin(self, unguarded: _UnguardedStep | None) -> None:
        """Begin a step. The step before, if it was not guarded, may have raised."""
        if self._unguarded is not None:
            self._unguarded.give_up()
        self._left_over = self.record.overflowed
        self.record.overflowed, self._unguarded = False, unguarded

    @around_compiled
    def _step(
        self, optimizer: Optimizer, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if closure_of(args, kwargs) is not None:
            return self._step_with_closure(optimizer, original, args, kwargs)
        found: bool | Tensor | None = self._overflows(optimizer)
        skips_itself = isinstance(found, Tensor) and is_fused(optimizer)
        skips_itself = skips_itself and begin_momentum(optimizer)
        if not skips_itself and found is not None:
            found = bool(found)
            if found:
                self._add(True)
                return None
        passes = InnerPasses(optimizer, self._makes_passes) if self._may_make_passes else None
        if skips_itself:
            optimizer.found_inf = found  # type: ignore[attr-defined]
        try:
            result = original(*args, **kwargs)
        finally:
            if skips_itself:
                del optimizer.found_inf  # type: ignore[attr-defined]
            if passes is not None:
                passes.leave()
        self._end(passes, found)
        return result

    @not_compiled
    def _step_with_closure(
        self, optimizer: Optimizer, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if not self._closure_may_scale(optimizer):
            return original(*args, **kwargs)
        guarded, args, kwargs = self._guarded(optimizer, args, kwargs)
        if guarded.overflowed:
            self._add(True)
            return guarded.loss
        # Among PyTorch's own, which begin with the closure, LBFGS alone calls it again.
        is_at_risk = not guarded.is_first or (guarded.is_scaled and isinstance(optimizer, LBFGS))
        undo = Undo(optimizer) if is_at_risk else None
        result = original(*args, **kwargs)
        if guarded.is_scaled:
            self._add(guarded.overflowed)
        if guarded.overflowed and undo is not None:
            undo.restore(optimizer)
        return result

    def _guarded(
        self, optimizer: Optimizer, args: Any, kwargs: Any
    ) -> tuple[GuardedClosure, Any, Any]:
        def overflows() -> bool | None:
            found = self._overflows(optimizer)
            return None if found is None else bool(found)

        is_first = not self._is_wrapped and _begins_with_closure(optimizer)
        return guarding_closure(args, kwargs, overflows, is_first)

    @not_compiled
    def _overflows(self, optimizer: Optimizer) -> Tensor | None:
        """Return whether gradients overflowed that are made under a scale, or that one may have
        spilled into; None if there are none, or a GradScaler looks after them."""
        in_use = [*self._in_use()]
        if not in_use:  # as in bfloat16
            return None
        parameters = parameters_of(optimizer)
        owned = self._owned(parameters, in_use)
        left_over = None if owned else self._left_over
        others = [s for s in in_use if s not in owned and s.may_have_spilled(optimizer, left_over)]
        explicit = bool(owned or others) and is_grad_scaler_stepping(sys._getframe())
        for scale in owned:
            scale.driven_by_grad_scaler = explicit
        if not (owned or others) or (owned and explicit):
            return None
        asked = owned | dict.fromkeys(others, ()) if others else owned
        found: Tensor = overflowed(parameters, asked, optimizer, left_over)
        return None if explicit else with_passes_before(found)

    @not_compiled
    def _add(self, overflowed: bool | Tensor) -> None:
        """Take note of a step under a scale."""
        self.record.add(overflowed)
        note_step(overflowed)

    @not_compiled
    def _end(self, passes: InnerPasses | None, found: bool | Tensor | None) -> None:
        """End a step: undo it if need be, and take note of it. `found`: whether gradients that it
        began with overflowed; None if they were made under no scale."""
        if passes is not None and passes.were_made:
            self._makes_passes = True
            found = passes.end() or found or False
        if found is not None:
            self._add(found)

    def scales(self, optimizer: Optimizer) -> list[GraphScale]:
        """Return the scales that this optimizer's gradients are made under, the oldest first."""
        return [*self._owned(parameters_of(optimizer), self._in_use())]

    def _owned(
        self, parameters: Sequence[Tensor], in_use: Iterable[GraphScale]
    ) -> dict[GraphScale, Sequence[Tensor]]:
        """Return, for each scale, those of the optimizer's parameters that are its model's own."""
        return {
            scale: own
            for scale in in_use
            if (own := scale.parameters.among(parameters)) or weakref.ref(scale) in self.attached
        }

    def before_unguarded_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Begin the net under a step that did not come through this guard: the step in which the
        optimizer was found, or a call of its class's `step`. It cannot be stopped any more. If
        gradients overflowed the optimizer gets zeros, and its changes are undone after."""
        step = self._unguarded
        if step is not None and steps_around(sys._getframe(), enough=2) > 1:
            step.depth += 1  # it calls the step of its base class
            return None
        step = _UnguardedStep()
        self._begin(step)
        if closure_of(args[1:], kwargs) is None:
            found = self._overflows(optimizer)
            if found is not None and bool(found):
                self._add(True)
                step.undo = Undo(optimizer)
                step.undo.give_zeros()
            else:
                step.found = None if found is None else False
                step.passes = InnerPasses(optimizer, self._makes_passes, is_hooked=True)
            return None
        guarded, others, kwargs = self._guarded(optimizer, args[1:], kwargs)
        if guarded.is_scaled or not guarded.is_first:
            step.undo = Undo(optimizer)
            if guarded.overflowed:
                step.undo.give_zeros()
        return (optimizer, *others), kwargs

    def after_unguarded_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """End that net. `args` and `kwargs` are those that `before_unguarded_step` left."""
        step = self._unguarded or _UnguardedStep()  # the optimizer's guarded step ran inside of it
        step.depth -= 1
        if step.depth > 0:
            return
        self._unguarded = None
        if step.passes is not None:
            self._end(step.passes, step.found)
        closure = closure_of(args[1:], kwargs)
        if isinstance(closure, GuardedClosure) and closure.is_scaled:
            self._add(closure.overflowed)
        if step.undo is not None and self.record.overflowed:
            step.undo.restore(optimizer)


def _begins_with_closure(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step begins with a call of the closure, as PyTorch's own do, unless
    there are hooks other than ours."""
    own: Any = getattr(optimizer, "_optimizer_step_pre_hooks", {})
    hooks = [*own.values(), *_global_optimizer_pre_hooks.values()]
    modules = [str(getattr(hook, "__module__", "")) for hook in hooks]
    return is_pytorchs(optimizer) and all(module.startswith("amp_graph.") for module in modules)
