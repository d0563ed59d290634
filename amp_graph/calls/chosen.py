"""By which captures a model is called: its own, or those of one that is alike.

Many threads may call a model at once. One of them chooses, for all; those that come to the same
wait, and find it done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from amp_graph.backend.compiler import Compiler
from amp_graph.calls.alike import Kind, captures_for, keep, kind_of
from amp_graph.calls.model_graphs import ModelGraphs
from amp_graph.capture.captures import Caller, Captures, GuardsFail
from amp_graph.capture.dynamo import BREAK_AT_DATA, EACH_SIZE_APART
from amp_graph.modules import Forwards, Run, weak_method, without_autocast


class InForce(NamedTuple):
    """See `Chosen`."""

    caller: Caller | None
    run: Run
    settings: Mapping[str, Any]


class Chosen:
    """Which captures one model is called by; the model is held weakly.

    caller: what `run`, which is there before it, calls the model with; None before the first call.
    is_stale: whether they are of no use any more.
    around: what is put around a run.
    settings: of Dynamo, other than usual, with which captures are made.
    """

    def __init__(self, graphs: ModelGraphs, compiler: Compiler):
        self._graphs, self._compiler = graphs, compiler
        self.caller: Caller | None = None
        self.run: Run
        self.is_stale = False
        self.around: Callable[[Run], Run] = without_autocast
        self.settings: Mapping[str, Any] = {}
        self._kind: Kind | None = None
        self._hosts: Iterator[Captures] = iter(())  # to be called by what was captured of them
        self._choosing = threading.RLock()

    @property
    def _module(self) -> nn.Module:
        return self._graphs.entry.module

    def begin(self) -> None:
        """Before the first call."""
        with self._choosing:
            if self.caller is not None:
                return
            if not self._graphs.hooks.are_there():
                self._kind = kind_of(self._graphs.entry, self._compiler)
            if self._kind is not None:
                self._hosts = captures_for(self._kind)
            self._be_guest()

    def _be_guest(self) -> None:
        """Be called by what was captured of the next one that is alike, if there is one."""
        for captures in self._hosts:
            if not captures.have_changed():
                caller = Caller(captures, self._graphs, is_guest=True)
                self._call_by(caller, partial(weak_method(self._as_guest), caller))
                return
        self.capture()

    def _as_guest(self, caller: Caller, *args: Any, **kwargs: Any) -> Any:
        try:
            return caller(*args, **kwargs)
        except GuardsFail:
            with self._choosing:
                if self.caller is caller:
                    self._be_guest()
        return self.run(*args, **kwargs)

    def capture(self) -> None:
        """Capture anew, from the next call on."""
        with self._choosing:
            caller = self.new_caller()
            self._call_by(caller, caller)

    def capture_instead_of(self, caller: Caller | None) -> None:
        """The same, if it is by this that the model is still called."""
        with self._choosing:
            if self.caller is caller:
                self.capture()

    def untried_settings(self, is_first: bool) -> Mapping[str, Any] | None:
        """With which capture may fail no more. In a first call all sizes are known."""
        if not self.settings:
            return BREAK_AT_DATA
        is_tried = is_first or self.settings is EACH_SIZE_APART
        return None if is_tried else EACH_SIZE_APART

    def capture_with(self, untried: Mapping[str, Any] | None, tried: Mapping[str, Any]) -> bool:
        """The same, with settings that were not tried, if there are any. Whether a call may go
        otherwise now than one in which capture failed with those that were `tried`: also if another
        thread, for which it failed too, has changed them meanwhile."""
        with self._choosing:
            if self.settings is not tried:
                return True
            if untried is None:
                return False
            self.settings = untried
            self.capture()
            return True

    def in_force(self) -> InForce:
        """What a call goes by now."""
        with self._choosing:
            return InForce(self.caller, self.run, self.settings)

    def put_back(self, before: InForce) -> None:
        """Go by that again, which was captured before and is as good as it was."""
        with self._choosing:
            self.caller, self.run, self.settings = before

    def new_caller(self) -> Caller:
        """What captures anew, for `run` to go on by, perhaps."""
        captures = Captures(self._graphs.entry, self._graphs.frames.number, self.settings)
        return Caller(captures, self._graphs)

    def _call_by(self, caller: Caller, run: Run) -> None:
        self._forwards, self.is_stale = Forwards(self._graphs.entry), False
        self.run = self.around(run)
        self.caller = caller

    def is_another(self) -> bool:
        """Whether the code of the model, or of a part, is not what was captured."""
        return self._forwards.have_changed(self._module)

    def share(self) -> None:
        """Let others be called by what was captured in the first call."""
        if self._kind is not None and self.caller is not None and self.caller.captures.graphs:
            keep(self._kind, self.caller.captures)
