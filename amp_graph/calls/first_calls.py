"""Conclusions that are drawn from the first calls of a model, for later ones.

They are watched for work that is done in float32 beside the graphs; later, each that comes after a
capture is. Once a call tells enough, it is reported what was converted, code between the graphs is
put under autocast if it did such work, and models that are alike may be called by the captures.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from amp_graph.backend.compiler import Compiler
from amp_graph.calls.call_path import ENDED, CallPath
from amp_graph.calls.call_state import CallState
from amp_graph.calls.fallback import Fallback
from amp_graph.calls.first_report import tell_of_first_call
from amp_graph.calls.model_graphs import ModelGraphs
from amp_graph.calls.or_else import or_else
from amp_graph.calls.outside import OutsideWatch
from amp_graph.capture.captures import Caller
from amp_graph.capture.dynamo import DYNAMO_ERRORS
from amp_graph.capture.surroundings import can_watch
from amp_graph.errors import warn
from amp_graph.modes import BeginAt
from amp_graph.modules import Run
from amp_graph.outer_autocast import without_autocast
from amp_graph.snapshots import ModelSnapshot
from amp_graph.weak_references import weak_method


class FirstCalls:
    """The first calls of a model at one entry, and what is concluded from them.

    are_over: whether a call has told of what was converted.
    between: the place in the record of the plan that stands for code between graphs, if any.
    """

    def __init__(self, graphs: ModelGraphs, compiler: Compiler, path: CallPath, fallback: Fallback):
        self._graphs, self._path, self._fallback = graphs, path, fallback
        self._entry, self._policy, self._record = graphs.entry, compiler.policy, compiler.record
        # Of several calls at once one takes the watch, and one ends all: `dict.pop` is one step.
        self._next_watch: dict[str, OutsideWatch] = {}
        self._watches_for = {"lists": compiler.lists} if can_watch() else {}  # until they are over
        self.begin_again()
        self.are_over = False
        self.between: int | None = None
        self._may_set_up = True  # the model itself, in a first call unlike later ones; once

    def begin(self, state: CallState) -> None:
        """Have a call watched, and what it does to the model noted, if there is need."""
        state.snapshot = None if self.are_over else ModelSnapshot(self._entry.module)
        state.watch = self._next_watch.pop("call", None)

    def begin_again(self) -> None:
        """Have another call watched in place of one that has ended with an error, has captured
        something, or tells nothing of later ones; unless watches are over."""
        if (lists := self._watches_for.get("lists")) is not None:
            self._next_watch["call"] = OutsideWatch(lists)

    def conclude(self, state: CallState) -> bool:
        """Draw conclusions from a call that has ended. Returns whether it tells of later ones."""
        watch = state.watch
        tells = watch is None or not self._is_unlike_later(watch, state.snapshot)
        if watch is not None and tells:
            self._judge(watch)
        is_of_first = watch is not None or self._path.state in ENDED
        if tells and (is_of_first or self.are_over or not self._watches_for):
            self._tell()
        return tells

    def _is_unlike_later(self, watch: OutsideWatch, snapshot: ModelSnapshot | None) -> bool:
        """Whether later calls will go otherwise than this one: they find hooks that it has set up
        or, where it is not captured or no graph of it could be rewritten, parts and values; or they
        may be without hooks for all modules, a FLOP counter's."""
        if watch.adds_hooks:
            return True
        plans = self._record.plans[self._path.first_plan :]
        is_left = watch.found or (plans and all(plan.fallback for plan in plans))
        sets_up = is_left and snapshot is not None and snapshot.was_set_up()
        is_unlike = self._may_set_up and bool(sets_up or self._graphs.hooks.are_for_all())
        if is_unlike and sets_up:
            self._graphs.budget.take_skipped()
            self._path.capture_anew()  # where Dynamo left code to Python
        self._may_set_up &= not is_unlike
        return is_unlike

    def may_have_set_up(self, snapshot: ModelSnapshot | None) -> bool:
        """Whether a call that was not captured may have set the model up: a first one that changed
        it, once."""
        changed = self._may_set_up and snapshot is not None and snapshot.has_other_attributes()
        self._may_set_up &= not changed
        return changed

    def _tell(self) -> None:
        """Report what Dynamo skipped and, after the first call, what was converted. From then on
        models that are alike may be called by these captures, if no code ran beside their graphs.
        Of concurrent first calls the watched one reports."""
        skipped = self._graphs.budget.take_skipped()
        if not self.are_over:
            self.are_over = True
            plans = self._record.plans[self._path.first_plan :]
            tell_of_first_call(self._entry, self._policy, plans, self._has_run())
            if not skipped:
                self._path.share()
        self._record.breaks += skipped

    def _has_run(self) -> bool:
        """Whether any graph has."""
        return any(index >= self._path.first_plan for index in self._record.runs)

    def _judge(self, watch: OutsideWatch) -> None:
        """Have the code between graphs run under autocast if it did work for low precision.

        If that came before the first graph, this one runs without autocast: what Dynamo records
        under autocast may ask for a low precision, as `x.to(y.dtype)`, which the model does not.
        """
        knows_more = self._policy.names_parts or watch.takes_off  # than autocast
        if not watch.found or knows_more or self._watches_for.pop("lists", None) is None:
            return
        found = ", ".join(sorted(watch.found))
        reason = f"code between graphs ({found}) is not captured"
        if not self._has_run():
            why = self._graphs.budget.why_nothing(self._entry.module)
            reason = f"nothing is captured ({found}): {why}"
        index = self._fallback.stand_in(reason, watch.met_sparse)
        plan = self._record.plans[index]
        if not self._has_run():
            since = ", from its next call on," if plan.autocast else ""
            warn(f"{self._entry.name}{since} {plan.otherwise}")
        if plan.autocast:
            begin_at = None if watch.in_front else self._graphs.behind_first
            around, passed_on = weak_method(self._autocast_around), {*DYNAMO_ERRORS}
            self._path.put_around(partial(around, index, begin_at, passed_on))
            self.between = index

    def _autocast_around(
        self, index: int, begin_at: BeginAt | None, passed_on: set[type[Exception]], run: Run
    ) -> Run:
        """Put autocast around a captured call, for the code between its graphs, for which plan
        `index` stands. If that fails, it is captured without, and goes on so."""
        first: Any = weakref.proxy(self)  # which keeps what is returned
        callers: list[Caller] = []

        def make_other() -> Run:
            callers.append(first._path.new_caller())
            return without_autocast(callers[-1])

        def report(reason: str) -> None:
            first._path.go_on_without(callers[-1])
            first._fallback.not_under_autocast(index, reason)

        under = self._fallback.under_autocast(run, index, is_all=False, begin_at=begin_at)
        return or_else(under, make_other, report, self._entry.module, passed_on)
