"""An optimizer that skips a step whose gradients overflowed, without a trace in its state.

- A fused optimizer gets `found_inf`, as from GradScaler, and leaves everything alone on the device;
  the host need not wait to know.
- Any other is not called.
- One that calls its closure again and again, as LBFGS does, may meet an overflow in the middle of
  its work: parameters and state are put back when it is done.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_graph.errors import CheckpointError
from amp_graph.training.engine import around_compiled, not_compiled, sent
from amp_graph.training.found_inf import found_inf, parameters_of
from amp_graph.training.grad_scaler import is_grad_scaler_stepping
from amp_graph.training.graph_scale import GraphScale
from amp_graph.training.loss_scale import load_state
from amp_graph.training.undo import Copies, GuardedClosure, closure_of, guarding_closure

STATE_KEY = "amp_graph"  # in an optimizer's state_dict
UNREAD = 256  # flags kept before they are summed up, so that not every step pays for a sum

FindScales = Callable[[Optimizer], Iterable[GraphScale]]


@dataclass(frozen=True)
class StepCounts:
    """How often an optimizer stepped, and how often it had to skip."""

    stepped: int
    skipped: int


class StepGuard:
    """Stands in front of one optimizer's `step`. It holds no reference to the optimizer.

    find_scales: the scales in use that a parameter of the optimizer is under.
    """

    def __init__(self, optimizer: Optimizer, find_scales: FindScales):
        self.attached: list[weakref.ref[GraphScale]] = []
        self.tells = False  # whether step() returns whether it stepped
        self.is_stepping = False
        self._find_scales = find_scales
        self._overflowed: bool | Tensor = False  # a tensor if the host does not know
        self._calls_closure_again = True  # until it is seen not to
        self._steps = 0
        self._skipped = 0
        self._unread: list[Tensor] = []  # found_inf of steps that are not in that count
        self._loaded: tuple[list[Any], int, int] | None = None
        self._unguarded = 0  # how deep in steps that did not come through here
        self._undo: Copies | None = None  # of such a step
        try:
            optimizer.register_state_dict_post_hook(self._save)
        except AttributeError:  # a subclass that calls no `__init__` lacks what hooks are kept in
            Optimizer.__setstate__(optimizer, {})
            optimizer.register_state_dict_post_hook(self._save)
        optimizer.register_load_state_dict_pre_hook(self._check_loaded)
        optimizer.register_load_state_dict_post_hook(self._apply_loaded)
        self._stand_before(optimizer)

    def _stand_before(self, optimizer: Optimizer) -> None:
        original = optimizer.step

        @around_compiled
        @functools.wraps(original)
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            # The step before, if it was not guarded, may have raised.
            self._overflowed, self._unguarded, self._undo = False, 0, None
            with self._stepping():
                result = self._step(optimizer, original, args, kwargs)
            return self._overflowed == 0 if result is None and self.tells else result

        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        before, self.is_stepping = self.is_stepping, True
        try:
            yield
        finally:
            self.is_stepping = before

    @around_compiled
    def _step(
        self, optimizer: Optimizer, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        scales = self.scales_to_ask(optimizer)
        if not scales:
            return original(*args, **kwargs)
        if closure_of(args, kwargs) is not None:
            return self._step_with_closure(optimizer, original, scales, args, kwargs)
        found = check(optimizer, scales)
        if _can_skip_by_itself(optimizer):
            self._record(found)
            optimizer.found_inf = found  # type: ignore[attr-defined]
            try:
                return original(*args, **kwargs)
            finally:
                del optimizer.found_inf  # type: ignore[attr-defined]
        self._record(bool(found))
        return None if self._overflowed else original(*args, **kwargs)

    @not_compiled
    def _step_with_closure(
        self,
        optimizer: Optimizer,
        original: Callable[..., Any],
        scales: Sequence[GraphScale],
        args: Any,
        kwargs: Any,
    ) -> Any:
        guarded, args, kwargs = _guarded(optimizer, scales, args, kwargs)
        if guarded.overflowed:
            self._record(True)
            return guarded.loss
        is_at_risk = self._calls_closure_again or not guarded.is_first
        copies = Copies(optimizer) if is_at_risk else None
        result = original(*args, **kwargs)
        self._calls_closure_again = guarded.calls > 1
        self._record(guarded.overflowed)
        if guarded.overflowed and copies is not None:
            copies.put_back(optimizer)
        return result

    @not_compiled
    def scales_to_ask(self, optimizer: Optimizer) -> list[GraphScale]:
        """The scales whose gradients are to be checked now: none if a GradScaler does it."""
        scales = self.scales(optimizer)
        explicit = bool(scales) and is_grad_scaler_stepping(sys._getframe())
        for scale in scales:
            scale.driven_by_grad_scaler = explicit
        return [] if explicit else scales

    def scales(self, optimizer: Optimizer) -> list[GraphScale]:
        """The scales that this optimizer's gradients are made under, the oldest first."""
        attached = [scale for ref in self.attached if (scale := ref()) is not None]
        found = {s.serial: s for s in (*attached, *self._find_scales(optimizer)) if s.is_in_use}
        return [found[serial] for serial in sorted(found)]

    def before_unguarded_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """The net under a step that did not come through this guard: the step in which the
        optimizer was found, or a call of its class's `step`. It cannot be stopped any more. If
        gradients overflowed the optimizer gets zeros, and what it does is undone after."""
        self._unguarded += 1
        if self._unguarded > 1:  # a step that calls the step of its base class
            return None
        self._undo = None
        scales = self.scales_to_ask(optimizer)
        if not scales:
            return None
        if closure_of(args[1:], kwargs) is None:
            self._record(bool(check(optimizer, scales)))
            if self._overflowed:
                self._undo = Copies(optimizer)
                self._undo.give_zeros()
            return None
        guarded, others, kwargs = _guarded(optimizer, scales, args[1:], kwargs)
        self._undo = Copies(optimizer)
        if guarded.overflowed:
            self._undo.give_zeros()
        return (optimizer, *others), kwargs

    def after_unguarded_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """`args` and `kwargs` are those that the one before left."""
        self._unguarded -= 1
        if self._unguarded > 0:
            return
        undo, self._undo = self._undo, None
        closure = closure_of(args[1:], kwargs)
        if isinstance(closure, GuardedClosure):
            self._record(closure.overflowed)
        if undo is not None and self._overflowed:
            undo.put_back(optimizer)

    @not_compiled
    def _record(self, overflowed: bool | Tensor) -> None:
        self._steps += 1
        self._overflowed = overflowed
        if isinstance(overflowed, Tensor):
            self._unread.append(overflowed)
            if len(self._unread) == UNREAD:
                self._unread = [_sum(self._unread)]
        else:
            self._skipped += overflowed

    @property
    def counts(self) -> StepCounts:
        skipped = self._read_skipped()
        return StepCounts(self._steps - skipped, skipped)

    def _read_skipped(self) -> int:
        """How many steps were skipped; waits for the device."""
        if self._unread:
            self._skipped += int(_sum(self._unread))
            self._unread.clear()
        return self._skipped

    def _save(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        scales = self.scales(optimizer)
        if scales:
            saved = [scale.state_dict() for scale in scales]
            counts = {"steps": self._steps, "skipped": self._read_skipped()}
            state[STATE_KEY] = {"scales": saved, **counts}

    def _check_loaded(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Raise CheckpointError before anything is changed."""
        saved, scales = state.get(STATE_KEY), self.scales(optimizer)
        self._loaded = None
        if saved is None or not scales:
            return
        try:
            states, steps, count = list(saved["scales"]), int(saved["steps"]), int(saved["skipped"])
            if not 0 <= count <= steps:
                raise ValueError(f"{count} of {steps} steps skipped")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
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
        self._loaded = loaded, steps, count

    def _apply_loaded(self, optimizer: Optimizer) -> None:
        if self._loaded is not None:
            loaded, self._steps, self._skipped = self._loaded
            self._unread.clear()
            for scale, config, state in loaded:
                scale.go_on_from(config, state)


def _sum(flags: Sequence[Tensor]) -> Tensor:
    """Of flags that may be on several devices, if a model was moved meanwhile."""
    return torch.stack([sent(flag, flags[-1].device) for flag in flags]).sum()


def _can_skip_by_itself(optimizer: Optimizer) -> bool:
    """Whether it is fused, and has begun with all parameters: what a fused SGD skips in a
    parameter's first step is to initialise the momentum (torch 2.13)."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and all(
        parameter in optimizer.state
        for group in optimizer.param_groups
        if group.get("momentum")
        for parameter in group["params"]
        if parameter.grad is not None
    )


def _guarded(
    optimizer: Optimizer, scales: Sequence[GraphScale], args: Any, kwargs: Any
) -> tuple[GuardedClosure, Any, Any]:
    return guarding_closure(args, kwargs, lambda: bool(check(optimizer, scales)), type(optimizer))


@not_compiled
def check(optimizer: Optimizer, scales: Sequence[GraphScale]) -> Tensor:
    """Whether any gradient overflowed; each scale is told of its own parameters' gradients."""
    parameters = parameters_of(optimizer)
    if len(scales) == 1:
        found = found_inf(parameters, checked=scales[0].checked)
        scales[0].stepped(found, optimizer)
        return found
    covered = [scale.own(parameters) for scale in scales]
    ids = {id(p) for own in covered for p in own}
    of_all = found_inf(p for p in parameters if id(p) not in ids)
    for scale, own in zip(scales, covered, strict=True):
        found = found_inf(own, checked=scale.checked)
        scale.stepped(found, optimizer)
        of_all = torch.maximum(found, sent(of_all, found.device))
    return of_all
