"""By what a model is called: by its own captures, by those of one that is alike, or by its code.

Many threads may call a model at once. One of them chooses, for all; those that come to the same
wait, and find it done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from amp_graph.backend.compiler import Compiler
from amp_graph.calls.capture_cache import CacheKey, cache_key, cached, number_for, store
from amp_graph.calls.model_graphs import ModelGraphs
from amp_graph.capture import dynamo
from amp_graph.capture.captures import Caller, Captures, GuardsFail
from amp_graph.capture.left_frames import try_flat_again
from amp_graph.gradients.engine import OUTSIDE, backward_pass
from amp_graph.modules import Forwards, Run
from amp_graph.outer_autocast import without_autocast
from amp_graph.weak_references import weak_method


class State(Enum):
    """How a model is called: by captures, until these end and its own code runs.

    CAPTURED: by captures. If there is no caller either, it was not called yet.
    STALE: by these captures in a backward pass, which computes again what the forward pass did, and
        in the same way; else by new ones.
    LEAVING: by these captures in a backward pass; else by its own code.
    LEFT: by its own code.
    """

    CAPTURED = auto()
    STALE = auto()
    LEAVING = auto()
    LEFT = auto()


CAPTURED, STALE, LEAVING, LEFT = State  # each call asks; as `State.LEFT` they take longer (3.11)
ENDED = LEAVING, LEFT


class DynamoSettings(Enum):
    """Dynamo's settings, other than usual, in the order in which they are tried."""

    AS_USUAL = MappingProxyType[str, bool]({})
    BREAK_AT_DATA = dynamo.BREAK_AT_DATA
    EACH_SIZE_APART = MappingProxyType({**dynamo.BREAK_AT_DATA, **dynamo.EACH_SIZE_APART})


class Strategy(NamedTuple):
    """How a model is captured. `around`: what is put around a run."""

    settings: DynamoSettings
    around: Callable[[Run], Run]

    def untried(self, is_first: bool, settings_may_help: bool) -> Strategy | None:
        """The next one, in which capture may fail no more. In a first call all sizes are known."""
        if settings_may_help and self.settings is DynamoSettings.AS_USUAL:
            return self._replace(settings=DynamoSettings.BREAK_AT_DATA)
        if settings_may_help and self.settings is DynamoSettings.BREAK_AT_DATA and not is_first:
            return self._replace(settings=DynamoSettings.EACH_SIZE_APART)
        return None if self.around is without_autocast else USUAL


USUAL = Strategy(DynamoSettings.AS_USUAL, without_autocast)
InForce = tuple[Caller | None, Run, Strategy]  # what `CallPath` says of these


class CallPath:
    """The choice of what one model is called by. The model is held weakly.

    state: read without the lock, and changed by `_turn`.
    fallback: the own code to run, once it was chosen. It stays after `go_back`, as a call may be
        about to run it.
    caller: the caller inside `run`, which is set before it.
    first_plan: the place of the first graph in the record.
    strategy: how captures are made.
    """

    def __init__(self, graphs: ModelGraphs, compiler: Compiler):
        self._graphs, self._compiler = graphs, compiler
        self.state = CAPTURED
        self.fallback: Run
        self._may_go_back = False  # from that to captures, which work
        self.caller: Caller | None = None
        self.run: Run
        self.first_plan = 0
        self.strategy = USUAL
        self._places_before: set[int] = set()
        self._key: CacheKey | None = None
        self._number = graphs.budget.number
        self._hosts: Iterator[Captures] = iter(())  # to be called by what was captured of them
        self._choosing = threading.RLock()

    def places(self) -> set[int]:
        """Return the places in the record of the graphs that calls run; until there is one, of the
        graphs that they ran before."""
        assembled = [] if self.caller is None else [*self.caller.assembled.values()]
        return {graph.place for graph in assembled} or self._places_before

    def choose(self) -> None:
        """Choose, before a call, what it goes by if captures hold no more."""
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
        """Change the present state to the one beside it in `to`, if it is there."""
        with self._choosing:
            self.state = to.get(self.state, self.state)

    def capture_anew(self) -> None:
        """Capture anew as soon as no backward pass runs."""
        self._turn({CAPTURED: STALE})

    def end_captures(self) -> None:
        """Have all models that are called by these captures capture anew."""
        if self.caller is not None:
            self.caller.captures.is_stale = True

    def _begin(self) -> None:
        with self._choosing:
            if self.caller is not None:
                return
            self.first_plan = len(self._compiler.record.plans)
            if not self._graphs.hooks.are_there:
                self._key = cache_key(self._graphs.entry, self._compiler)
            if self._key is not None:
                hosts = cached(self._key)
                number = number_for(hosts)
                self._hosts = iter(hosts)
                self._number = self._number if number is None else number
            self._be_guest()

    def _be_guest(self) -> None:
        """Call the model by the captures of the next model that is alike, or capture it if there is
        none."""
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

    def capture_by(self, untried: Strategy | None, tried: Strategy) -> InForce | None:
        """Capture by the strategy `untried`, since capture failed by `tried`. Returns what was in
        force, for `put_back`; None if no strategy is left. If another thread has changed it
        meanwhile, nothing more is done."""
        with self._choosing:
            before = self.caller, self.run, self.strategy
            if self.strategy == tried:
                if untried is None:
                    return None
                self.strategy = untried
                self._capture()
            return before

    def put_back(self, before: InForce) -> None:
        """Return to captures from before, which are as good as they were."""
        with self._choosing:
            self.caller, self.run, self.strategy = before

    def new_caller(self) -> Caller:
        """Return a caller that captures anew, which `run` may go on by."""
        captures = Captures(self._graphs.entry, self._number, self.strategy.settings.value)
        return Caller(captures, self._graphs)

    def _call_by(self, caller: Caller, run: Run) -> None:
        self._places_before = self.places()
        self._forwards = Forwards(self._graphs.entry)
        self._turn({STALE: CAPTURED})
        self.run = self.strategy.around(run)
        self.caller = caller

    def put_around(self, around: Callable[[Run], Run]) -> None:
        """Put this around runs, from the next captures on."""
        with self._choosing:
            self.strategy = self.strategy._replace(around=around)
            self.capture_anew()

    def go_on_without(self, caller: Caller) -> None:
        """Put nothing around runs any more, and call the model by what was captured that way."""
        self.strategy, self.caller = self.strategy._replace(around=without_autocast), caller

    def end_with(self, fallback: Run, at_once: bool) -> None:
        """Capture no more, and run this code: at once, or as soon as no backward pass runs."""
        with self._choosing:
            self.fallback, self._may_go_back = fallback, False
            self._turn(dict.fromkeys(State, LEFT if at_once else LEAVING))

    def leave_for(self, fallback: Run) -> None:
        """Run this code as soon as no backward pass runs, until `go_back`."""
        with self._choosing:
            self.end_with(fallback, at_once=False)
            self._may_go_back = True

    def go_back(self, for_good: bool) -> None:
        """Go back from that code to the captures before it, unless other code was chosen."""
        with self._choosing:
            if self._may_go_back:
                self._turn({LEAVING: STALE, LEFT: CAPTURED})
                self._may_go_back = not for_good

    def leave_again(self) -> None:
        """Undo `go_back`, unless it was for good."""
        with self._choosing:
            if self._may_go_back:
                self._turn({STALE: LEAVING, CAPTURED: LEFT})

    def share(self) -> None:
        """Let other models be called by the captures of the first call, if these are still of use
        and nothing is to run beside their graphs."""
        is_all = self.strategy.around is without_autocast and self.state is CAPTURED
        if is_all and self._key is not None and self.caller and self.caller.captures.graphs:
            store(self._key, self.caller.captures)
