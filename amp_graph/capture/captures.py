"""What was captured of a model, and which models are called by it.

    graphs of one model <---- its own calls
                        <---- calls of others that are alike: a copy, the next one of an ensemble

Dynamo's guards say what a model has to be like, not which one it is. So one that is new is called
by what was captured of others first: capturing takes seconds, in which a small one may be trained.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CodeType
from typing import Any, Protocol

import torch
from torch import fx, nn

from amp_graph.capture.dynamo import SETTINGS, CapturedCode, settings
from amp_graph.capture.frames import Frames
from amp_graph.capture.inner_gradients import compile_in_parts
from amp_graph.capture.logs import UnheardLogs
from amp_graph.capture.said_once import SaidOnce
from amp_graph.modules import Run, alive, weak_method

MANY = 64  # graphs, beside Dynamo's limit of 256 for each piece of code

_now = threading.local()  # .caller: in whose call this thread is; .policy_id: what it captures


@torch.compiler.assume_constant_result
def captured_policy_id() -> int:
    """The `policy_id` of the model that this thread captures, 0 if it captures none. Dynamo asks
    while it captures, and makes no guard of the answer."""
    return getattr(_now, "policy_id", 0)


class GuardsFail(Exception):
    """A model is not like the one that was captured. Nothing of its call has run."""


class Called(Protocol):
    """A model, as it is called by captured graphs. `frames` counts its captures; converted parts of
    the same `policy_id` are captured with it."""

    frames: Frames
    policy_id: int

    @property
    def module(self) -> nn.Module:
        """The model itself."""

    def settings(self) -> Mapping[str, Any]:
        """Of Dynamo, other than SETTINGS, for a capture that begins now."""

    def build(self, graph: fx.GraphModule, example_inputs: list[Any]) -> Any:
        """What is made of a graph for all models that are called by it."""

    def assemble(self, built: Any) -> Run:
        """What runs it in this model."""


class Captures:
    """The graphs of one model, in order of capture, each with what was built of it.

    number: the model's, see `Frames`.
    own: settings of Dynamo, other than usual.
    """

    def __init__(self, module: nn.Module, number: int, own: Mapping[str, Any] | None = None):
        self._own = own or {}
        self._logs, self._said_once = UnheardLogs(), SaidOnce()
        self._is_stale = False
        self.graphs: list[tuple[fx.GraphModule, Any]] = []
        compile_graph, around = weak_method(self._compile_graph), weak_method(self._capturing)
        self.code = CapturedCode(module, number, compile_graph, around)

    def have_changed(self) -> bool:
        """Whether they are of no use any more, to whichever model. To be asked before each call."""
        self._is_stale |= self._logs.have_changed() or self._said_once.have_changed()
        return self._is_stale

    def _compile_graph(self, graph: fx.GraphModule, example_inputs: list[Any]) -> Run:
        called = _now.caller.called
        return compile_in_parts(graph, example_inputs, self._compile_part, called.module)

    def _compile_part(self, graph: fx.GraphModule, example_inputs: list[Any]) -> Run:
        caller: Caller = _now.caller
        index, built = len(self.graphs), caller.called.build(graph, example_inputs)
        caller.runs[index] = caller.called.assemble(built)
        self.graphs.append((graph, built))
        return partial(_run, weakref.ref(self), index)  # Dynamo keeps it for good

    @contextlib.contextmanager
    def _capturing(self, code: CodeType) -> Iterator[None]:
        """Around the capture of a frame."""
        caller: Caller = _now.caller
        if code is self.code.entry and not caller.may_capture():
            raise GuardsFail
        called = caller.called
        chosen = {**SETTINGS, **self._own, **called.settings(), **self._logs.settings()}
        before, _now.policy_id = captured_policy_id(), called.policy_id
        try:
            with settings(chosen, self._said_once), called.frames.counted():
                yield
        finally:
            _now.policy_id = before


def _run(captures: Callable[[], Captures | None], index: int, *args: Any) -> Any:
    """Run a graph of these in the model that is being called by them. That is another one, or none,
    where Dynamo was told to run whatever was captured by anybody (`torch._dynamo.run`)."""
    caller: Caller | None = getattr(_now, "caller", None)
    found = alive(captures)
    if caller is None or caller.captures is not found:
        graph, _ = found.graphs[index]
        return graph.forward(*args)
    run = caller.runs.get(index) or caller.assemble(index)
    return run(*args)


class Caller:
    """Calls a model, which it does not keep alive, by what was captured of it or, as a guest, of
    another one. Of a guest nothing is captured before guards held in a call, nor where the captures
    are MANY: then it raises GuardsFail."""

    def __init__(self, captures: Captures, called: Called, is_guest: bool = False):
        self.captures, self._is_guest = captures, is_guest
        self.runs: dict[int, Run] = {}
        self._has_returned = False
        self._called, self._module = weakref.ref(called), weakref.ref(called.module)

    @property
    def called(self) -> Called:
        return alive(self._called)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()  # which lives while it is called
        before, _now.caller = getattr(_now, "caller", None), self
        try:
            result = self.captures.code(module, *args, **kwargs)
        finally:
            _now.caller = before
        self._has_returned = True
        return result

    def may_capture(self) -> bool:
        is_welcome = self._has_returned and len(self.captures.graphs) < MANY
        return is_welcome or not self._is_guest

    def assemble(self, index: int) -> Run:
        """What runs a graph in this model, from now on."""
        _, built = self.captures.graphs[index]
        run = self.runs[index] = self.called.assemble(built)
        return run
