"""The captures of a model, and the models that are called by them.

    graphs of one model <---- its own calls
                        <---- calls of others that are alike: a copy, the next one of an ensemble

Dynamo's guards say what a model has to be like, not which one it is. So a new model is called by
the captures of others first: capturing takes seconds, in which a small one may be trained.

Private names of PyTorch used here; seen to work on 2.11 and 2.13 to 2.15:

    torch._dynamo.callback.on_compile_start, callback_handler, CallbackArgs, CallbackTrigger
                                                                 when Dynamo begins
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CodeType
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx, nn
from torch._dynamo.callback import (
    CallbackArgs,
    CallbackTrigger,
    callback_handler,
    on_compile_start,
)

from amp_graph.capture import autocast_regions
from amp_graph.capture.budget import CaptureBudget
from amp_graph.capture.dynamo import LEFT_ALONE, SETTINGS, CapturedCode, settings
from amp_graph.capture.function_modes import modes_on, without_modes
from amp_graph.dynamo_changes.inner_gradients import compile_in_parts
from amp_graph.dynamo_changes.logs import UnheardLogs
from amp_graph.dynamo_changes.said_once import SaidOnce
from amp_graph.dynamo_changes.slow_sizes import SizesTakeLong
from amp_graph.graphs.input_names import Names
from amp_graph.modules import Entry, Run
from amp_graph.weak_references import alive, weak_method

PAUSE = 1e-3  # seconds
MANY = 64  # graphs, beside Dynamo's limit of 256 for each piece of code

_assembling = threading.RLock()


class Frame(NamedTuple):
    """The frame that is being captured.

    policy_id, module_id: those of the model.
    is_entry: whether a call begins with this frame.
    is_in_region: whether it is inside an autocast region of the model's own.
    """

    policy_id: int = 0
    module_id: int = 0
    is_entry: bool = False
    is_in_region: bool = False


class _Now(threading.local):
    """The current state of a thread.

    caller: the call that it is in.
    known: how many captures of what a call begins with there were when its call began.
    frame: the frame that it captures.
    """

    def __init__(self) -> None:
        self.caller: Caller | None = None
        self.known = 0
        self.frame = Frame()

    def calling(self) -> Caller:
        assert self.caller is not None, "a capture outside of a call"
        return self.caller


_now = _Now()


@torch.compiler.assume_constant_result
def captured_policy_id() -> int:
    """Return the `policy_id` of the model that this thread captures, 0 if it captures none. Dynamo
    calls this while it captures, and makes no guard of the answer."""
    return _now.frame.policy_id


@torch.compiler.assume_constant_result
def captured_module_id() -> int:
    """Return the `id` of the model that this thread captures."""
    return _now.frame.module_id


def captured_names(entry: Entry) -> Names:
    """Return the model's names for what this thread captures of it."""
    return Names.of(entry.module, entry.entered if _now.frame.is_entry else None)


def in_a_call(of: nn.Module | None = None) -> bool:
    """Whether this thread is inside a call by captures of this package; of this model, if given."""
    caller = _now.caller
    return caller is not None and (of is None or caller.called.module is of)


@contextlib.contextmanager
def other_captures_heard(hear: Callable[[], None]) -> Iterator[None]:
    """Have `hear` called, within, when Dynamo begins to capture for somebody else."""

    def begin(args: CallbackArgs) -> None:
        if args.callback_trigger is CallbackTrigger.DYNAMO and not in_a_call():
            hear()

    on_compile_start(begin)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # `torch._dynamo.reset` forgets it
            callback_handler.remove_start_callback(begin)


class GuardsFail(Exception):
    """The model is not like the captured one. Nothing of its call has run."""


class CapturedMeanwhile(Exception):
    """Another thread captured something, perhaps just what this thread was about to. Nothing of
    this thread's call has run."""


class Assembled(NamedTuple):
    """A graph in one model: its place in the model's record, and the function that runs it."""

    place: int
    run: Run


class Called(Protocol):
    """A model as captured graphs call it.

    budget: counts its captures.
    policy_id: converted parts with the same one are captured with it.
    """

    budget: CaptureBudget
    policy_id: int

    @property
    def module(self) -> nn.Module:
        """The model itself."""

    def settings(self, is_first: bool) -> Mapping[str, Any]:
        """Return Dynamo's settings, other than SETTINGS, for a capture that begins now. `is_first`:
        nothing that was captured before is in use."""

    def build(self, graph: fx.GraphModule, example_inputs: list[Any]) -> Any:
        """Build a graph for all models that are called by it."""

    def assemble(self, built: Any) -> Assembled:
        """Assemble a built graph in this model."""


class Captures:
    """The graphs of one model, entered one way, in order of capture, each with its built form.

    number: the model's, see `CaptureBudget`, or that of an earlier model of its kind, whose
        changing numbers and sizes Dynamo then knows, see `CapturedCode`.
    own: settings of Dynamo, other than usual.
    is_stale: whether all models that are called by these captures are to capture anew.
    """

    def __init__(self, entry: Entry, number: int, own: Mapping[str, Any] | None = None):
        self._own, self.number = own or {}, number
        self._logs, self._said_once = UnheardLogs(), SaidOnce()
        self.is_stale = False
        self.graphs: list[tuple[fx.GraphModule, Any]] = []
        self.entered = 0  # captures of what a call begins with
        compile_graph, around = weak_method(self._compile_graph), weak_method(self._capture)
        self.code = CapturedCode(entry, number, compile_graph, around)

    def have_changed(self) -> bool:
        """Whether the captures are of no use to any model any more. Must be asked before each
        call."""
        self.is_stale |= self._logs.have_changed() or self._said_once.have_changed()
        return self.is_stale

    def _compile_graph(self, graph: fx.GraphModule, example_inputs: list[Any]) -> Run:
        called = _now.calling().called
        return compile_in_parts(graph, example_inputs, self._compile_part, called.module)

    def _compile_part(self, graph: fx.GraphModule, example_inputs: list[Any]) -> Run:
        caller = _now.calling()
        if not (frame := _now.frame).is_entry:
            autocast_regions.hold_in_region(frame.is_in_region)
        if frame.is_in_region:
            autocast_regions.write_region(graph)
        index, built = len(self.graphs), caller.called.build(graph, example_inputs)
        self.graphs.append((graph, built))
        caller.assemble(index)
        return partial(_run, weakref.ref(self), index)  # Dynamo keeps it for good

    def _capture(self, code: CodeType, capture: Callable[[], Any]) -> Any:
        """Capture a frame of this code. A thread waits here until others have made theirs."""
        caller = _now.calling()
        is_first = self.code.begins_with(code)
        if is_first and not caller.may_capture():
            raise GuardsFail
        called = caller.called
        if called.budget.leaves(code):
            return LEFT_ALONE
        before, ids = _now.frame, (called.policy_id, id(called.module))
        _now.frame = Frame(*ids, is_first, autocast_regions.is_in_region())
        try:
            try:
                return self._captured(called, code, capture)
            except SizesTakeLong:  # which changes the settings
                return self._captured(called, code, capture)
        finally:
            _now.frame = before

    def _captured(self, called: Called, code: CodeType, capture: Callable[[], Any]) -> Any:
        is_first = _now.frame.is_entry
        own = {**self._own, **called.settings(is_first and not self.entered)}
        with settings({**SETTINGS, **own, **self._logs.settings()}, self._said_once):
            if is_first and self.entered != _now.known:
                raise CapturedMeanwhile
            result = called.budget.counted(code, capture)
            self.entered += is_first
            return result


def _run(captures: Callable[[], Captures | None], index: int, *args: Any) -> Any:
    """Run a graph in the model that is being called by these captures. Where another model is
    called, or none, since Dynamo was told to run everybody's captures (`torch._dynamo.run`), run it
    as captured."""
    caller = _now.caller
    found = alive(captures)
    if caller is None or caller.captures is not found:
        graph, _ = found.graphs[index]
        return graph.forward(*args)
    assembled = caller.assembled.get(index) or caller.assemble(index)
    if not modes_on():
        return assembled.run(*args)
    with without_modes():
        return assembled.run(*args)


class Caller:
    """Calls a model, which it does not keep alive, by its own captures or, as a guest, by another
    model's.

    For a guest nothing is captured before a call whose guards held, nor where there are MANY
    graphs; GuardsFail is raised then.
    """

    def __init__(self, captures: Captures, called: Called, is_guest: bool = False):
        self.captures, self._is_guest = captures, is_guest
        self.assembled: dict[int, Assembled] = {}
        self._has_returned = False
        self._called, self._module = weakref.ref(called), weakref.ref(called.module)

    @property
    def called(self) -> Called:
        return alive(self._called)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()  # which lives while it is called
        before, _now.caller = _now.caller, self
        around = autocast_regions.begin()
        try:
            while True:  # each time for a capture that another thread has made
                _now.known = self.captures.entered
                try:
                    result = self.captures.code(module, *args, **kwargs)
                except CapturedMeanwhile:
                    time.sleep(PAUSE)  # Dynamo keeps it only once the other's callback returned
                    continue
                self._has_returned = True
                return result
        finally:
            autocast_regions.end(around)
            _now.caller = before

    def may_capture(self) -> bool:
        is_welcome = self._has_returned and len(self.captures.graphs) < MANY
        return is_welcome or not self._is_guest

    def assemble(self, index: int) -> Assembled:
        """Assemble a graph in this model, once, whichever thread comes first."""
        with _assembling:
            if index not in self.assembled:
                _, built = self.captures.graphs[index]
                self.assembled[index] = self.called.assemble(built)
            return self.assembled[index]
