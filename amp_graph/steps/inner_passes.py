"""Passes that an optimizer makes inside of a step that it got no closure for.

    GSAM         calls what `set_closure` gave it, moves the weights by gradients, calls it again
    AdaHessian   takes a second derivative, of gradients that were made before the step

Whether their gradients overflow nobody can know before the step begins. What it takes to undo it is
copied when the first pass begins: from the next step on at its beginning, as an optimizer that once
made passes will again. What leaves graphs in these passes is checked as ever; the flags are heard.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_graph.gradients.checked_gradients import CheckedGradients
from amp_graph.gradients.engine import OUTSIDE, any_of, backward_pass
from amp_graph.gradients.found_inf import found_inf, is_alone, parameters_of
from amp_graph.gradients.owned_parameters import OwnedParameters
from amp_graph.steps.hooks import steps_around
from amp_graph.steps.undo import Undo
from amp_graph.uncaptured import not_compiled

Found = bool | Tensor


class InnerScale(Protocol):
    """The loss scale of a model that runs in a step."""

    checked: CheckedGradients
    parameters: OwnedParameters

    def is_on(self) -> bool: ...
    def stepped(self, found_inf: Tensor, by: object) -> None: ...


_under_way: list[InnerPasses] = []


class InnerPasses:
    """The backward passes inside one step, from when it begins. `leave` has to be called when the
    step is over.

    are_known: whether the optimizer made some before.
    is_hooked: whether only hooks tell when it is over, which do not run if it raises.
    """

    @not_compiled
    def __init__(self, optimizer: Optimizer, are_known: bool, is_hooked: bool = False):
        self._optimizer, self._is_hooked = weakref.ref(optimizer), is_hooked
        self._thread, self._running = threading.get_ident(), backward_pass()
        self._flags: dict[InnerScale, list[Tensor]] = {}
        self._skips: list[Found] = []  # of other optimizers' steps inside of this one
        self._undo: Undo | None = None
        self._written: Callable[[], list[Tensor]] | None = None
        if are_known:
            self._prepare(optimizer)
        _under_way.append(self)

    @property
    def were_made(self) -> bool:
        return bool(self._flags)

    def _prepare(self, optimizer: Optimizer) -> None:
        if self._undo is None:
            self._undo = Undo(optimizer)
            self._written = _written_since(parameters_of(optimizer))

    def note(self, scale: InnerScale) -> None:
        """Take note that a pass of a model begins."""
        optimizer = self._optimizer()
        is_new = scale not in self._flags and scale.is_on()
        if not is_new or optimizer is None or not scale.parameters.among(parameters_of(optimizer)):
            return
        self._prepare(optimizer)
        self._flags[scale] = []
        scale.checked.hearing.append(self._flags[scale])

    def is_here(self, is_elsewhere: bool = False) -> bool:
        """Whether this thread is in the step; with `is_elsewhere`, whether it may be, as the
        backward thread of a device other than the CPU."""
        if is_elsewhere and self._running == backward_pass():
            return False  # the step is a part of that very pass
        is_mine = is_elsewhere or threading.get_ident() == self._thread
        if is_mine and self._is_hooked and not self._is_running():
            self.leave()
            return False
        return is_mine

    def _is_running(self) -> bool:
        return steps_around(sys._current_frames().get(self._thread)) > 0

    @not_compiled
    def leave(self) -> None:
        """End the step, which may have raised."""
        with contextlib.suppress(ValueError):
            _under_way.remove(self)
        for scale, flags in self._flags.items():
            hearing = scale.checked.hearing
            hearing[:] = [each for each in hearing if each is not flags]

    def flags(self) -> list[Tensor]:
        """Return the flags of what was checked up to now. Of processes that train together each
        knows its own."""
        return [flag for flags in self._flags.values() for flag in flags] if is_alone() else []

    @not_compiled
    def end(self) -> bool:
        """Undo the step if anything in it overflowed, and say so."""
        self.leave()
        optimizer = self._optimizer()
        if optimizer is None or not self._flags:
            return False
        overflowed = any(map(bool, self._skips))
        parameters = parameters_of(optimizer)
        for scale, flags in self._flags.items():
            found = found_inf(scale.parameters.among(parameters), checked=scale.checked)
            found = any_of([found, *(flags if is_alone() else ())], found.device)
            if bool(found):
                scale.stepped(torch.ones_like(found), optimizer)
                overflowed = True
        if overflowed and self._undo is not None and self._written is not None:
            written = self._written()
            self._undo.restore(optimizer)
            for parameter in written:
                parameter.grad = None  # what was in it is no more
        return overflowed


def _written_since(parameters: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Return a function that tells which of these parameters have a gradient that was written to
    since."""

    def version(gradient: Tensor | None) -> int:
        return -1 if gradient is None or gradient.is_inference() else gradient._version

    before = [(p, p.grad, version(p.grad)) for p in parameters]
    return lambda: [p for p, gradient, written in before if version(gradient) != written]


def note_forward(scale: InnerScale) -> None:
    """Take note that a model with this scale is called."""
    for step in [*_under_way]:
        if step.is_here():
            step.note(scale)


def note_backward(scale: InnerScale, device: torch.device) -> None:
    """Take note, in a backward pass, that a gradient comes into a graph of a model with this
    scale."""
    if _under_way and backward_pass() != OUTSIDE:
        for step in [*_under_way]:
            if step.is_here(is_elsewhere=device.type != "cpu"):
                step.note(scale)


def note_step(found: Found) -> None:
    """Take note that an optimizer stepped, or had to skip."""
    for step in [*_under_way]:
        if step.is_here():
            step._skips.append(found)


def with_passes_before(found: Tensor) -> Tensor:
    """Whether to skip a step: an overflow in the step that it is inside of counts, too."""
    if not _under_way:
        return found
    flags = [f for step in [*_under_way] if step.is_here() for f in step.flags()]
    return any_of([found, *flags], found.device) if flags else found


def is_pytorchs(optimizer: Optimizer) -> bool:
    """Whether an optimizer's `step` is one of PyTorch's own, none of which makes passes by
    itself."""
    step: Any = getattr(type(optimizer), "step", None)
    return str(getattr(step, "__module__", "")).startswith("torch.optim.")
