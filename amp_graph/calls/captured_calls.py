"""The calls of a converted model, and what runs where it cannot be captured.

    by its graphs          until Dynamo cannot capture it, or has to at every single call;
                           the code between them under autocast, once it was seen to matter
    by its own code        from then on, under autocast

Where autocast fails, code runs in float32; by its graphs again, if these were only too small.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch

from amp_graph.backend.compiler import Compiler
from amp_graph.calls.call_path import ENDED, LEFT, STALE, USUAL, CallPath
from amp_graph.calls.call_state import CallState
from amp_graph.calls.convertible import initialize
from amp_graph.calls.fallback import Fallback
from amp_graph.calls.first_report import tell_of_first_call
from amp_graph.calls.model_graphs import ModelGraphs
from amp_graph.calls.or_else import or_else
from amp_graph.calls.outside import OutsideWatch, Watches, may_be_ours
from amp_graph.capture.breaks import depends_on_data, why_not_captured
from amp_graph.capture.captures import Caller
from amp_graph.capture.dynamo import (
    CAPTURED_TOO_OFTEN,
    DYNAMO_ERRORS,
    OFF,
    is_of_capture,
    is_off,
)
from amp_graph.errors import MISTAKES, warn
from amp_graph.modes import BeginAt
from amp_graph.modules import Entry, Run
from amp_graph.outer_autocast import without_autocast
from amp_graph.snapshots import ModelSnapshot
from amp_graph.weak_references import weak_method


class CapturedCalls:
    """The calls of a model at one entry: by its captures, or those of a model that is alike,
    compiled by `compiler`; by its own code where there are none."""

    def __init__(self, entry: Entry, compiler: Compiler):
        self._entry, self._policy, self._record = entry, compiler.policy, compiler.record
        self.fallback = Fallback(entry, self._policy, self._record)
        self._graphs = ModelGraphs(entry, compiler)
        self.policy_id = self._graphs.policy_id
        self._budget, self._hooks = self._graphs.budget, self._graphs.hooks
        self._path = CallPath(self._graphs, compiler)
        self._watches = Watches(compiler.lists)
        self._between: int | None = None  # the plan that stands for code between graphs, if any
        self._is_new = True  # until a call has told of what was converted
        self._may_set_itself_up = True  # once, in a call that tells nothing of later ones

    def graphs_in_force(self) -> set[int]:
        """Return the places in the record of the graphs that a call may run; until something is
        captured anew, those that were captured before."""
        if self._path.state in ENDED:
            return set()
        return self._path.places()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        path = self._path
        if self._is_new and self._entry.is_call:
            initialize(self._entry.module, args, kwargs)
        if self._is_new and path.state not in ENDED and is_off():
            self._fall_back((OFF, ""), "is not captured", at_once=True)
        if path.state is not LEFT:
            path.choose()
        if path.state is LEFT:
            return path.fallback(*args, **kwargs)
        before, uncaptured = CallState(), None
        before.begun, before.charged = self._budget.this_thread.begun, self._budget.charged
        before.runs, before.records = self._graphs.this_thread.runs, torch.is_grad_enabled()
        before.strategy = path.strategy
        before.snapshot = ModelSnapshot(self._entry.module) if self._is_new else None
        before.watch = watch = self._watches.take()
        run = path.run if watch is None else partial(self._graphs.run_watched, watch, path.run)
        try:
            result = run(*args, **kwargs)
        except BaseException as error:
            if watch is not None:
                self._watches.add()
            if not may_be_ours(error, watch is not None, before.snapshot is not None):
                is_of_model = isinstance(error, Exception)  # and no interrupt
                self._begin_again(is_of_model and self._budget.this_thread.begun != before.begun)
                raise
            uncaptured, before.watch = error, None
        if uncaptured is not None:  # outside of the handler: its error is no part of the user's own
            result = self._run_uncaptured(uncaptured, before, args, kwargs)
        has_captured = self._budget.this_thread.begun != before.begun
        is_counted = self._budget.unpaid or self._budget.failed
        if has_captured or is_counted or self._is_new or before.watch is not None:
            self._look_back(before, has_captured)
        return result

    def _begin_again(self, has_captured: bool = True) -> None:
        """Begin anew after a call that raised, which tells nothing of other calls."""
        self._budget.end_failed_call(has_captured)
        self._stop_if_too_many()

    def _look_back(self, before: CallState, has_captured: bool) -> None:
        """Look, after a call, whether all that was asked for happened, and whether to go on so."""
        watch, runs = before.watch, self._graphs.this_thread.runs - before.runs
        says_little = watch is not None and self._says_little(watch, before.snapshot)
        if watch is not None and not says_little:
            self._judge(watch)
        is_of_first = watch is not None or self._path.state in ENDED
        if not says_little and (is_of_first or not self._is_new or self._watches.are_over()):
            self._tell()
        self._budget.end_call(has_captured, before.charged)
        if has_captured or says_little:
            self._watches.add()
        if has_captured or says_little or self._path.state is STALE:  # others are to be captured
            runs = 0
        self._stop_if_too_many(runs)

    def _says_little(self, watch: OutsideWatch, snapshot: ModelSnapshot | None) -> bool:
        """Whether later calls will go otherwise than this one: they find hooks that it has set up
        or, where it is not captured, parts; or they may be without hooks for all modules, a FLOP
        counter's."""
        if watch.adds_hooks:
            return True
        sets_up = watch.found and snapshot is not None and snapshot.was_set_up()
        is_first = self._may_set_itself_up and bool(sets_up or self._hooks.are_for_all())
        if is_first and sets_up:
            self._budget.take_skipped()
            self._path.capture_anew()  # where Dynamo left code to Python
        self._may_set_itself_up &= not is_first
        return is_first

    def _tell(self) -> None:
        """Report what Dynamo skipped and, after the first call, what was converted. From then on
        models that are alike may be called by these captures, if no code ran beside their graphs.
        Of concurrent first calls the watched one reports."""
        skipped = self._budget.take_skipped()
        if self._is_new:
            self._is_new = False
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
        if not watch.found or knows_more or not self._watches.end():
            return
        found = ", ".join(sorted(watch.found))
        reason = f"code between graphs ({found}) is not captured"
        if not self._has_run():
            why = self._budget.why_nothing(self._entry.module)
            reason = f"nothing is captured ({found}): {why}"
        index = self.fallback.stand_in(reason, watch.met_sparse)
        plan = self._record.plans[index]
        if not self._has_run():
            since = ", from its next call on," if plan.autocast else ""
            warn(f"{self._entry.name}{since} {plan.otherwise}")
        if plan.autocast:
            begin_at = None if watch.in_front else self._graphs.behind_first
            around, passed_on = weak_method(self._autocast_around), {*DYNAMO_ERRORS}
            self._path.put_around(partial(around, index, begin_at, passed_on))
            self._between = index

    def _stop_if_too_many(self, runs: int = 0) -> None:
        """Capture no more if that costs more than it is worth: some Python value is another in call
        after call (a list that grows, the layers that are chosen), or so many small graphs ran in a
        call that the model's own code is faster."""
        if self._path.state in ENDED:
            return
        if (why := self._budget.why_too_many()) is not None:
            self._fall_back(why, "is no longer captured")
        elif (too_small := self._graphs.why_too_small(runs, self._between)) is not None:
            self._leave_small_graphs(too_small)
        elif (slow := self._budget.why_so_slow()) is not None:
            warn(f"{self._entry.name} {slow}")

    def _fall_back(self, why: tuple[str, str], what: str, at_once: bool = False) -> None:
        """Run the model's own code from now on."""
        reason, advice = why
        index = self.fallback.stand_in(reason)
        self._path.end_with(self.fallback.run(index), at_once)
        warn(f"{self._entry.name} {what} and {self._record.plans[index].otherwise}{advice}")

    def _leave_small_graphs(self, why: str) -> None:
        """Run the model's own code, until autocast fails in it: the graphs work."""
        index, again = self.fallback.stand_in(why), weak_method(self._run_small_graphs)
        told = partial(weak_method(self._stay_with_small_graphs), index)
        self._path.leave_for(self.fallback.run_or_else(index, again, told))
        warn(f"{self._entry.name} is no longer captured and {self._record.plans[index].otherwise}")

    def _run_small_graphs(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call in which autocast failed by the graphs. If they raise as well, nothing has
        changed."""
        self._path.go_back(for_good=False)
        try:
            return self(*args, **kwargs)
        except BaseException:
            self._path.leave_again()
            raise

    def _stay_with_small_graphs(self, index: int, reason: str) -> None:
        """Stay with the graphs that plan `index` had left: they have run where autocast failed."""
        self._path.go_back(for_good=True)
        self._record.drop(index)
        if self._path.state not in ENDED:  # else it was told of what could not be captured
            again = "runs by its captured graphs again, small as they are"
            warn(f"{self._entry.name} {again}: autocast fails ({reason})")

    def _run_uncaptured(self, error: Exception, before: CallState, args: Any, kwargs: Any) -> Any:
        """Capture again after an error: with more breaks, then each size apart, if that is likely
        to help a model that would begin for the third time; then with the code between graphs in
        float32. If all was tried, run the model's own code."""
        torch.set_grad_enabled(before.records)  # whatever had been captured has run
        if before.snapshot is not None:
            before.snapshot.restore()
        cause = getattr(error, "inner_exception", None)
        if isinstance(cause, MISTAKES):
            self._begin_again()
            raise cause from None
        if self._hooks.are_for_all():  # a FLOP counter's, which later calls may be without
            self._begin_again()
            return self.fallback.run_uncaptured(*args, **kwargs)
        is_other = is_of_capture(error) and not isinstance(error, CAPTURED_TOO_OFTEN)
        has_run = self._graphs.this_thread.runs != before.runs
        may_help = depends_on_data(error) or (is_other and not has_run)
        untried = before.strategy.untried(self._is_new, may_help)
        in_force = self._path.capture_by(untried, before.strategy)
        if in_force is None:
            return self._end_with_fallback(error, before.snapshot, args, kwargs)
        try:
            result = self(*args, **kwargs)
        except BaseException:  # of the model's own, as it is called
            self._path.put_back(in_force)
            raise
        if untried == USUAL and self._path.state not in ENDED:
            why = f"a graph is not captured under it: {why_not_captured(error)}"
            self.fallback.not_under_autocast(self._between, why)
        return result

    def _end_with_fallback(
        self, error: Exception, snapshot: ModelSnapshot | None, args: Any, kwargs: Any
    ) -> Any:
        """Run the model's own code under autocast from now on: it may raise no error of capture, or
        catch it. The next call is captured again if this one raises, or is a first one that changed
        the model, which may set itself up in it."""
        if self._path.state in ENDED:  # another thread has found that out
            return self._path.fallback(*args, **kwargs)
        index = self.fallback.stand_in(f"not captured ({why_not_captured(error)})")
        planned, fallback = self._record.plans[index], self.fallback.run(index)
        try:
            result = fallback(*args, **kwargs)
        except Exception:
            self._record.drop(index)
            self._begin_again()
            raise
        if self._may_set_itself_up and snapshot and snapshot.has_other_attributes():
            self._may_set_itself_up = False  # more than once
            self._record.drop(index)
            self._begin_again()
            return result
        if self._record.plans[index].autocast is planned.autocast:  # else it was told why not
            warn(f"{self._entry.name} {planned.otherwise}")
        self._path.end_with(fallback, at_once=True)
        return result

    def _autocast_around(
        self, index: int, begin_at: BeginAt | None, passed_on: set[type[Exception]], run: Run
    ) -> Run:
        """Put autocast around a captured call, for the code between its graphs, for which plan
        `index` stands. If that fails, it is captured without, and goes on so."""
        calls: Any = weakref.proxy(self)  # which keeps what is returned
        callers: list[Caller] = []

        def make_other() -> Run:
            callers.append(calls._path.new_caller())
            return without_autocast(callers[-1])

        def report(reason: str) -> None:
            calls._path.go_on_without(callers[-1])
            calls.fallback.not_under_autocast(index, reason)

        under = self.fallback.under_autocast(run, index, is_all=False, begin_at=begin_at)
        return or_else(under, make_other, report, self._entry.module, passed_on)
