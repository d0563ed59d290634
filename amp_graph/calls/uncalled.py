"""Converted models that are trained without being called.

What is converted is the call `model(...)`. A script that trains one by its methods, by calls of its
parts, or through `torch.func.grad`, gets float32, though it may call the model to validate it: it
is told so when an optimizer has stepped the model's parameters twice. Those of parts that are
converted by themselves are these parts' matter, and those that another model was called with are
that one's: it is trained, and this one plays, or is evaluated. A call of a deep copy counts as
well: its gradients may be what the model is stepped by.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from amp_graph.calls.copies import converted_parts
from amp_graph.errors import warn
from amp_graph.gradients.found_inf import parameters_of
from amp_graph.steps.hooks import hear_steps
from amp_graph.uncaptured import not_compiled
from amp_graph.weak_references import living

STEPS = 2  # one may be a warm-up of a part


class Callee(Protocol):
    """The stand-in for a converted model's call."""

    is_awaited: bool  # until one of its calls, or of a copy's, is recorded, or none is to come


@dataclass
class _Awaited:
    callee: weakref.ref[Callee]
    model: weakref.ref[nn.Module]
    steps: int = 0  # in which the model's parameters were stepped
    # Optimizers that stepped none of them, and how many they stepped: a copy that plays, or keeps
    # averages, is not looked through at every step of the model that is trained.
    others: weakref.WeakKeyDictionary[Optimizer, int] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def is_open(self) -> bool:
        callee = self.callee()
        return callee is not None and callee.is_awaited and self.steps < STEPS

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
        if self.steps == STEPS:
            warn(
                f"{type(model).__name__} is trained, but has not been called with gradients "
                f"enabled, and is trained in float32: what is converted is the call `model(...)`, "
                f"not `model.forward(...)`, other methods, calls of its parts, or calls under "
                f"torch.func.grad. Name the methods that are called in convert(model, "
                f"methods=...), or convert the parts"
            )


def _of_others(model: nn.Module) -> set[int]:
    """Parameters that parts of the model have to answer for, or another one, by their ids."""
    others = (other.parameters() for other in (*converted_parts(model), *living(_called.keyrefs())))
    return {id(parameter) for parameters in others for parameter in parameters}


_awaited: list[_Awaited] = []
_called: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()


def await_call(callee: Callee, model: nn.Module) -> None:
    """Tell of it if a model is trained, and no call of it recorded. Neither is kept alive."""
    _forget()
    _awaited.append(_Awaited(weakref.ref(callee), weakref.ref(model)))
    hear_steps(after=_after_step)


def _forget() -> None:
    """Forget models that were called, told of or restored, or that are gone."""
    for each in _awaited:
        callee, model = each.callee(), each.model()
        if callee is not None and model is not None and not callee.is_awaited:
            _called[model] = None
    _awaited[:] = filter(_Awaited.is_open, _awaited)


@not_compiled
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _awaited:
        return
    _forget()
    stepped = parameters_of(optimizer)
    for each in list(_awaited):
        each.note_step(optimizer, stepped)
