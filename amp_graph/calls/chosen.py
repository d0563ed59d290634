"""By what a model is called: by its own captures, by those of one that is alike, or by its code.

Many threads may call a model at once. One of them chooses, for all; those that come to the same
wait, and find it done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from functools import partial
from typing import Any

from amp_graph.backend.compiler import Compiler
from amp_graph.calls.alike import Kind, captures_for, keep, kind_of, number_for
from amp_graph.calls.model_graphs import ModelGraphs
from amp_graph.calls.ways import PLAINLY, Way
from amp_graph.capture.captures import Caller, Captures, GuardsFail
from amp_graph.capture.frames import try_flat_again
from amp_graph.modules import Forwards, Run
from amp_graph.outer_autocast import without_autocast
from amp_graph.training.engine import OUTSIDE, backward_pass
from amp_graph.weak_references import weak_method


class State(Enum):
    """By what a model is called: by captures, until these end and its own code runs.

    CAPTURED: by captures; if there is no caller either, it was not called yet.
    STALE: by these only in a backward pass, which computes again what the forward pass did, and
        the same way; else by new ones.
    LEAVING: by these only in a backward pass, else by its own code.
    LEFT: by its own code.
    """

    CAPTURED = auto()
    STALE = auto()
    LEAVING = auto()
    LEFT = auto()


CAPTURED, STALE, LEAVING, LEFT = State  # each call asks; as `State.LEFT` they take longer (3.11)
ENDED = LEAVING, LEFT
InForce = tuple[Caller | None, Run, Way]  # what `Chosen` says of these


class Chosen:
    """By what one model is called; it is held weakly.

    state: is read without the lock, and changed by `_turn`.
    own_code: once it was chosen. It stays when it is gone back from, as a call may be about to
        run it.
    caller: what `run`, which is there before it, calls the model with.
    first_plan: of the graphs, by its place in the record.
    way: how captures are made.
    """

    def __init__(self, graphs: ModelGraphs, compiler: Compiler):
        self._graphs, self._compiler = graphs, compiler
        self.state = CAPTURED
        self.own_code: Run
        self._may_go_back = False  # from that to captures, which work
        self.caller: Caller | None = None
        self.run: Run
        self.first_plan = 0
        self.way = PLAINLY
        self._places_before: set[int] = set()
        self._kind: Kind | None = None
        self._number = graphs.frames.number
        self._hosts: Iterator[Captures] = iter(())  # to be called by what was captured of them
        self._choosing = threading.RLock()

    def places(self) -> set[int]:
        """Where the record has the graphs that calls run; until there is one, that they ran."""
        assembled = [] if self.caller is None else [*self.caller.assembled.values()]
        return {graph.place for graph in assembled} or self._places_before

    def choose(self) -> None:
        """Before a call: go by what comes next, if captures hold no more."""
        if self.state in ENDED:  # captures, which may be gone back to, are not asked
            if backward_pass() == OUTSIDE:
                self._turn({LEAVING: LEFT})
            return
        caller, hooks_have_changed = self.caller, self._graphs.hooks.have_changed()
        if caller is None:
            self._begin()
        elif hooks_have_changed or caller.captures.have_changed() or self._forwards.have_changed():
            with self._choosing:
                if hooks_have_changed or self.caller is caller:  # the former tell this once
                    self.capture_anew()
        if self.state is STALE and backward_pass() == OUTSIDE:
            with self._choosing:
                self._turn({LEAVING: LEFT})
                if self.state is STALE and self.caller is caller:
                    self._capture()

    def _turn(self, to: Mapping[State, State]) -> None:
        """From the present state to the one beside it, if it is among these."""
        with self._choosing:
            self.state = to.get(self.state, self.state)

    def capture_anew(self) -> None:
        """When no backward pass runs."""
        self._turn({CAPTURED: STALE})

    def _begin(self) -> None:
        with self._choosing:
            if self.caller is not None:
                return
            self.first_plan = len(self._compiler.record.plans)
            if not self._graphs.hooks.are_there():
                self._kind = kind_of(self._graphs.entry, self._compiler)
            if self._kind is not None:
                hosts = captures_for(self._kind)
                number = number_for(hosts)
                self._hosts = iter(hosts)
                self._number = self._number if number is None else number
            self._be_guest()

    def _be_guest(self) -> None:
        """Be called by what was captured of the next one that is alike, if there is one."""
        for captures in self._hosts:
            if not captures.have_changed():
                caller = Caller(captures, self._graphs, is_guest=True)
                self._call_by(caller, partial(weak_method(self._as_guest), caller))
                return
        self._capture()

    def _as_guest(self, caller: Caller, *args: Any, **kwargs: Any) -> Any:
        try:
            return caller(*args, **kwargs)
        except GuardsFail:
            with self._choosing:
                if self.caller is caller:
                    self._be_guest()
        return self.run(*args, **kwargs)

    def _capture(self) -> None:
        """Capture anew, from the next call on."""
        with self._choosing:
            try_flat_again(self._graphs.entry.module)
            caller = self.new_caller()
            self._call_by(caller, caller)
            self._compiler.record.cost.models = 1

    def capture_by(self, untried: Way | None, tried: Way) -> InForce | None:
        """Capture in the way that is `untried`, since capture failed in the one that was `tried`.
        Return what was in force, for `put_back`; None if no way is left. If another thread has
        changed the way meanwhile, nothing is done but that."""
        with self._choosing:
            before = self.caller, self.run, self.way
            if self.way == tried:
                if untried is None:
                    return None
                self.way = untried
                self._capture()
            return before

    def put_back(self, before: InForce) -> None:
        """Go by that again, which was captured before and is as good as it was."""
        with self._choosing:
            self.caller, self.run, self.way = before

    def new_caller(self) -> Caller:
        """What captures anew, for `run` to go on by, perhaps."""
        captures = Captures(self._graphs.entry, self._number, self.way.settings.value)
        return Caller(captures, self._graphs)

    def _call_by(self, caller: Caller, run: Run) -> None:
        self._places_before = self.places()
        self._forwards = Forwards(self._graphs.entry)
        self._turn({STALE: CAPTURED})
        self.run = self.way.around(run)
        self.caller = caller

    def put_around(self, around: Callable[[Run], Run]) -> None:
        """From the next captures on."""
        with self._choosing:
            self.way = self.way._replace(around=around)
            self.capture_anew()

    def go_on_without(self, caller: Caller) -> None:
        """Nothing more is to be put around a run; what was captured so is called from now on."""
        self.way, self.caller = self.way._replace(around=without_autocast), caller

    def end_with(self, own_code: Run, at_once: bool) -> None:
        """Capture no more, but run this: at once, or when no backward pass goes on."""
        with self._choosing:
            self.own_code, self._may_go_back = own_code, False
            self._turn(dict.fromkeys(State, LEFT if at_once else LEAVING))

    def leave_for(self, own_code: Run) -> None:
        """The same, but not for good, when no backward pass goes on."""
        with self._choosing:
            self.end_with(own_code, at_once=False)
            self._may_go_back = True

    def go_back(self, for_good: bool) -> None:
        """From that own code to the captures before it, unless other own code was chosen."""
        with self._choosing:
            if self._may_go_back:
                self._turn({LEAVING: STALE, LEFT: CAPTURED})
                self._may_go_back = not for_good

    def leave_again(self) -> None:
        """Unless it was gone back for good."""
        with self._choosing:
            if self._may_go_back:
                self._turn({STALE: LEAVING, CAPTURED: LEFT})

    def share(self) -> None:
        """Let others be called by what was captured in the first call, if it is still of use and
        nothing is to run beside its graphs."""
        is_all = self.way.around is without_autocast and self.state is CAPTURED
        if is_all and self._kind is not None and self.caller and self.caller.captures.graphs:
            keep(self._kind, self.caller.captures)
