"""The first call of each model of a script: the model is converted, or left alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import getattr_static
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.data import get_worker_info
from torch.utils.weak import WeakIdKeyDictionary

from amp_graph.autopatch.left_alone import (
    AUTOCAST,
    BY_SCRIPT,
    COMPILED,
    ON_META,
    is_around_converted,
    is_dry_run,
    is_in_float32,
    is_on_meta,
    is_under_autocast,
    other_dtypes,
    parameters_by_now,
    why_not,
)
from amp_graph.autopatch.script_models import Model, calls_of_captured, folded, model_of, owed
from amp_graph.callers import calling, first_argument
from amp_graph.calls.compiled_by_others import LEFT, compiled_around
from amp_graph.calls.conversion import found_conversion, restore_all
from amp_graph.calls.convertible import why_not_at_once
from amp_graph.calls.copies import is_copy, take_out_of_copy
from amp_graph.capture.budget import MAX_CAPTURES, REPAID_BY
from amp_graph.capture.captures import in_a_call
from amp_graph.capture.surroundings import can_capture, is_compiling_here, wants_plain_code
from amp_graph.convert import convert_at_first_call, is_converted, record_of, restore
from amp_graph.errors import did_you_mean, in_words
from amp_graph.gradients.engine import OUTSIDE, backward_pass, has_process_group
from amp_graph.modules import is_rerouted, unwrapped
from amp_graph.outer_autocast import autocast_devices
from amp_graph.policy import Policy
from amp_graph.uncaptured import never_captured, passed_over

TRIALS = 3  # calls of a part in the constructor of a module, or to see what it computes
PATIENCE = MAX_CAPTURES * REPAID_BY  # calls of a model whose like did not live long
SHORT_LIVED = (
    "models of this name are made and captured anew, and called too seldom to repay that; each is "
    "converted once it was called {} times"
)


class Models:
    """All models that were called so far, in this process.

    rank: this process's among those that train together, once a model was called; None if alone.
    missed: the globs of the policy that match no module of a converted model, and what comes close;
        None before there is one.
    compiles: whether the script compiles something by itself.
    say: what is told of them while the script runs goes here, a line at a time, and is told once
        however many models it is said of: a script may make them without end.
    """

    def __init__(self, policy: Policy, verbose: bool, say: Callable[[str], None]):
        self.seen: list[Model] = []
        self.rank: int | None = None
        self.missed: dict[str, str] | None = None
        self.compiles = False
        self._policy = replace(policy)  # itself by no other conversion
        self._verbose, self._say = verbose, say
        # By identity: a module may define an equality of its own.
        self._parts = WeakIdKeyDictionary()
        self._trials = WeakIdKeyDictionary()
        self._deciding = threading.RLock()  # several threads may call a new model at once
        self._local = threading.local()

    def is_inside(self) -> bool:
        """Whether this thread is inside of a model's call."""
        return getattr(self._local, "inside", False)

    @passed_over
    def on_call(self, module: nn.Module) -> Callable[..., Any] | None:
        """Return the function that a call of this module is to run; None inside of another model's
        call."""
        if self.is_inside() or is_compiling_here() or wants_plain_code():
            return None
        if type(module).__module__ == "torch.jit._trace":  # a holder that is about to trace
            return None
        return partial(self._outermost_call, module)

    @never_captured(reason="amp_graph takes note of what the script compiles")
    def on_compiled_call(self, module: nn.Module) -> None:
        """A call from what Dynamo has captured, or let be: of a converted model, or of the script,
        which is left as it is."""
        if self.is_inside() or in_a_call() or is_compiling_here() or wants_plain_code():
            return
        if self._is_open(module) and any(p.is_floating_point() for p in module.parameters()):
            inner = unwrapped(module)
            model = model_of(inner)
            model.left_alone = COMPILED
            self._keep(model, module, inner)
            self._say(LEFT)

    def on_compiling(self) -> None:
        """The script compiles something, perhaps models that it calls there. Of what it compiles
        inside of a model's call the model is told; of a converted one that it compiles as a whole
        it is told once Dynamo comes to that."""
        if self.is_inside():
            return
        model = compiled_around(sys._getframe())
        if model is not None and is_converted(model):
            return
        self.compiles = True
        self._say(LEFT)

    def _outermost_call(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if is_rerouted(module):
            return module._call_impl(*args, **kwargs)
        if is_copy(module):
            take_out_of_copy(module)
        if self._is_open(module) and not self._is_decided(module, (args, kwargs)):
            return module._call_impl(*args, **kwargs)
        in_backward = backward_pass() != OUTSIDE  # where checkpoint restores ours
        if not in_backward and any(map(torch.is_autocast_enabled, autocast_devices())):
            self._leave_to_autocast(module)
        self._local.inside = True
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            self._local.inside = False

    def _is_open(self, module: nn.Module) -> bool:
        """Whether it is yet to be decided about: it is new, no longer on the meta device or in
        other dtypes, or a part of a converted model that is called without it."""
        if module not in self._parts:
            return True
        model = self._parts[module]
        if model is None:
            return False
        if model.left_alone == ON_META:
            return not is_on_meta(module)
        if model.left_alone:
            return model.is_in_other_dtypes and is_in_float32(model.module() or module)
        repeats = backward_pass() != OUTSIDE  # what the whole did (`checkpoint`)
        return not repeats and model.module() is not unwrapped(module)

    def _is_decided(self, module: nn.Module, given: Any) -> bool:
        """Decide about a module. False: it has no parameters, now at least, or runs later, so that
        what it calls is decided about instead."""
        if get_worker_info() is not None:
            return True  # data is prepared as the script says
        if isinstance(module, ParametrizationList):
            return True  # no model, but a weight that is read, perhaps to be kept
        try:
            for part in module.modules():
                take_out_of_copy(part)
            inner = unwrapped(module)
            if not any(p.is_floating_point() for p in parameters_by_now(inner, given)):
                return False
            if why_not_at_once(getattr_static(type(inner), "forward", None)):
                return False
            is_ready = can_capture() and not any(map(is_lazy, inner.parameters()))
            if is_ready and not self._is_tried_out(inner) and not is_dry_run(inner, given):
                with self._deciding:
                    if self._is_open(module):
                        self._first_call(module, inner)
        except Exception as error:
            self._parts[module] = None
            self._say(f"{type(module).__name__} is left as it is: {in_words(error)}")
        return True

    def _is_tried_out(self, part: nn.Module) -> bool:
        """Whether it may be called no more: by the constructor of a module, to see what sizes come
        of it, for a look at what a part of a model computes, or since others of its name did not
        live long. One that is called again and again is in use."""
        if _is_being_built() or self._is_looked_at(part):
            enough = TRIALS
        elif enough := self._patience(type(part).__name__):
            self._say(f"{type(part).__name__} is left as it is: {SHORT_LIVED.format(enough)}")
        else:
            return False
        trials: int = self._trials.get(part, 0) + 1
        self._trials[part] = trials
        return trials <= enough

    def _patience(self, name: str) -> int:
        """How many calls of one of this name are awaited, as its like did not live long."""
        if calls := calls_of_captured(self.seen, name):
            return max(PATIENCE, calls)
        return PATIENCE if owed(self.seen, name) >= MAX_CAPTURES else 0

    def _is_looked_at(self, part: nn.Module) -> bool:
        """Whether it is part of a model that lives, and not trained by itself, as by a step that
        calls the parts where validation calls the whole."""
        model = self._parts.get(part)
        whole = None if model is None else model.module()
        if whole is None or whole is part:
            return False
        is_trained = part.training and torch.is_grad_enabled()
        return not (is_trained and any(p.requires_grad for p in part.parameters()))

    def _first_call(self, module: nn.Module, inner: nn.Module) -> None:
        """Convert a model or leave it alone; the latter whatever goes wrong."""
        if is_around_converted(inner):  # of which is told once Dynamo comes to that
            self._parts[module] = None
            return
        model = model_of(inner)
        if has_process_group():
            self.rank = torch.distributed.get_rank()  # asked now: at exit the group may be gone
        try:
            if self._is_ours(inner) and other_dtypes(inner):  # a copy that was cast since
                restore(inner)
            if self._is_ours(inner):  # a copy of a model that was converted here
                model.record = record_of(inner)
            else:
                model.left_alone = why_not(module, inner)
                model.is_in_other_dtypes = model.left_alone == other_dtypes(inner) != ""
                if model.left_alone in ("", BY_SCRIPT):
                    self._restore_parts(inner)
                if not model.left_alone:
                    self._convert(model, inner)
        except Exception as error:
            model.left_alone = in_words(error)
        self._keep(model, module, inner)
        if model.left_alone:
            self._say(f"{model.name} is left as it is: {model.left_alone}")
        elif self._verbose:
            self._say(f"{model.name} runs in mixed precision")

    def _keep(self, model: Model, module: nn.Module, inner: nn.Module) -> None:
        whole = self._parts.get(inner)
        if whole is not None and whole.module() is not inner and model.record is not None:
            whole.parts = (*dict.fromkeys((*whole.parts, model.name)),)
        self.seen = [*folded(m for m in self.seen if m.module() is not inner), model]
        self._parts.update(dict.fromkeys([module, *inner.modules()], model))

    def _leave_to_autocast(self, part: nn.Module) -> None:
        """A model that was converted when a script called it outside of its autocast is left alone
        from the first call inside on, and so are its parts that were models by themselves."""
        whole = self._parts.get(part)
        module = whole.module() if whole is not None and whole.record is not None else None
        if module is None or not is_converted(module) or not is_under_autocast(module):
            return
        for inner in module.modules():
            model = self._parts.get(inner)
            if model is not None and model.module() is inner and self._is_ours(inner):
                restore(inner)
                model.record, model.left_alone = None, AUTOCAST
                self._say(f"{model.name} is left as it is from now on: {AUTOCAST}")

    def _restore_parts(self, whole: nn.Module) -> None:
        """Restore those that were called by themselves before, or are copies of such models."""
        for part in whole.modules():
            if self._is_ours(part):
                restore(part)

    def _convert(self, model: Model, inner: nn.Module) -> None:
        convert_at_first_call(inner, self._policy)
        model.record = record_of(inner)
        if self._policy.keep_float32:
            paths = [path for path, _ in inner.named_modules()]
            missed = {g: did_you_mean(g, paths) for _, g in self._policy.unmatched(paths)}
            before = missed if self.missed is None else self.missed
            self.missed = {g: before[g] or hint for g, hint in missed.items() if g in before}

    def _is_ours(self, module: nn.Module) -> bool:
        """Whether it was converted here, or copied from a model that was."""
        conversion = found_conversion(module)
        return conversion is not None and conversion.policy is self._policy

    def begin_child(self) -> None:
        """In a process that was forked: the models so far are told of by its parent."""
        self.seen = []

    def restore_all(self) -> None:
        """Restore all models that were converted here, and copies of them."""
        restore_all(self._policy)


def _is_being_built() -> bool:
    """Whether the constructor of a module is at work."""
    return any(
        frame.f_code.co_name == "__init__" and isinstance(first_argument(frame), nn.Module)
        for frame in calling(sys._getframe(1))
    )
