"""Converted models that are trained without being called.

What is converted is the call `model(...)`. A script that trains one by its methods, by calls of its
parts, or through `torch.func.grad`, gets float32, though it may call the model to validate it: it
is told so when an optimizer has stepped the model's parameters twice. Those of parts that are
converted by themselves are these parts' matter, and those that another model was called with are
that one's: it is trained, and this one plays, or is evaluated. A call of a deep copy counts as
well: its gradients may be what the model is stepped by.

The same holds of one that is called with gradients, but stepped far more often; and of one that is
converted at its first call, and was stepped before.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from amp_graph.calls.copies import converted_parts
from amp_graph.errors import warn
from amp_graph.training.found_inf import parameters_of
from amp_graph.training.step_hooks import hear_steps
from amp_graph.uncaptured import not_compiled
from amp_graph.weak_references import living

STEPS = 2  # one may be a warm-up of a part
MANY, TIMES = 64, 16  # so many steps, and so many for each call: those go by something else


class Callee(Protocol):
    """What stands in front of a converted model's call."""

    is_awaited: bool  # until one of its calls, or of a copy's, is recorded, or none is to come
    recorded: float  # how many were; endless where that is not to be counted


@dataclass
class _Awaited:
    callee: weakref.ref[Callee]
    model: weakref.ref[nn.Module]
    before: weakref.WeakKeyDictionary[Optimizer, int]  # how often each had stepped anything
    steps: int = 0  # in which the model's parameters were stepped
    # Optimizers that stepped none of them, and how many they stepped: a copy that plays, or keeps
    # averages, is not looked through at every step of the model that is trained.
    others: weakref.WeakKeyDictionary[Optimizer, int] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def is_open(self) -> bool:
        callee = self.callee()
        return callee is not None and callee.is_awaited and self.steps < STEPS

    def note_many(self, optimizer: Optimizer, steps: _Steps) -> None:
        """Of a model that was called."""
        callee, model = self.callee(), self.model()
        number = steps.number - self.before.get(optimizer, 0)
        if callee is None or model is None or number < max(MANY, TIMES * callee.recorded):
            return
        of_model = steps.parameters.intersection(steps.earlier, map(id, model.parameters()))
        if not of_model <= _of_others(model):
            _tell(callee, model, f"was called with gradients enabled for few of {number} steps")

    def note_step(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """`parameters`: those that the optimizer stepped."""
        model = self.model()
        if model is None or self.others.get(optimizer) == len(parameters):
            return
        stepped = {*map(id, model.parameters())}.intersection(map(id, parameters))
        if not stepped or stepped <= _of_others(model):
            self.others[optimizer] = len(parameters)
            return
        self.steps += 1
        callee = self.callee()
        if self.steps == STEPS and callee is not None:
            _tell(callee, model, "has not been called with gradients enabled")


@dataclass
class _Steps:
    """Of one optimizer.

    parameters: those that had gradients at the last step whose number was a power of two, by their
        ids: to look at all in each step would take too long.
    earlier: at the one before that.
    """

    number: int = 0
    parameters: frozenset[int] = frozenset()
    earlier: frozenset[int] = frozenset()

    def add(self, optimizer: Optimizer) -> None:
        self.number += 1
        if self.number & (self.number - 1) == 0:
            stepped = (p for p in parameters_of(optimizer) if p.grad is not None)
            self.earlier, self.parameters = self.parameters, frozenset(map(id, stepped))
            for model in living(_called.keyrefs()) if self.number >= MANY else ():
                _called[model].note_many(optimizer, self)


def _tell(callee: Callee, model: nn.Module, how: str) -> None:
    callee.recorded = math.inf
    warn(
        f"{type(model).__name__} is trained, but {how}, and is trained in float32: what is "
        f"converted is the call `model(...)`, not `model.forward(...)`, other methods, calls of "
        f"its parts, or calls under torch.func.grad. Name the methods that are called in "
        f"convert(model, methods=...), or convert the parts"
    )


def _of_others(model: nn.Module) -> set[int]:
    """Parameters that parts of the model have to answer for, or another one, by their ids."""
    called = (other for other in living(_called.keyrefs()) if other is not model)
    others = (other.parameters() for other in (*converted_parts(model), *called))
    return {id(parameter) for parameters in others for parameter in parameters}


_awaited: list[_Awaited] = []
_called: weakref.WeakKeyDictionary[nn.Module, _Awaited] = weakref.WeakKeyDictionary()
_steps: weakref.WeakKeyDictionary[Optimizer, _Steps] = weakref.WeakKeyDictionary()


def await_call(callee: Callee, model: nn.Module) -> None:
    """Tell of it if a model is trained, and no call of it recorded. Neither is kept alive."""
    _forget()
    numbers = {each: _steps[each].number for each in living(_steps.keyrefs())}
    before = weakref.WeakKeyDictionary(numbers)
    _awaited.append(_Awaited(weakref.ref(callee), weakref.ref(model), before))
    hear_steps(after=_after_step)


def hear_training() -> None:
    """From now on, for `tell_if_trained`."""
    hear_steps(after=_after_step)


def tell_if_trained(callee: Callee, model: nn.Module) -> None:
    """Of a model that is about to be called for the first time: tell if optimizers have stepped it,
    and no other answers for its parameters."""
    _forget()
    steps = (_steps[each] for each in living(_steps.keyrefs()))
    stepped = {p for each in steps if each.number >= STEPS for p in each.parameters}
    of_model = stepped.intersection(map(id, model.parameters()))
    if not of_model <= _of_others(model):
        _tell(callee, model, "had not been called before")


def _forget() -> None:
    """Those that were called, told of or restored, or that are gone."""
    for each in _awaited:
        callee, model = each.callee(), each.model()
        if callee is not None and model is not None and not callee.is_awaited:
            _called[model] = each
    _awaited[:] = filter(_Awaited.is_open, _awaited)


@not_compiled
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    steps = _steps.get(optimizer)
    if steps is None:
        steps = _steps[optimizer] = _Steps()
    steps.add(optimizer)
    if not _awaited:
        return
    _forget()
    stepped = parameters_of(optimizer)
    for each in list(_awaited):
        each.note_step(optimizer, stepped)
