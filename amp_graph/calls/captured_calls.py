"""The calls of a converted model, and what runs where it cannot be captured.

    by its graphs          until Dynamo cannot capture it, or has to at every single call;
                           the code between them under autocast, once it was seen to matter
    by its own code        from then on, under autocast

Where autocast fails, code runs in float32; by its graphs again, if these were only too small.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from amp_graph.backend.compiler import Compiler
from amp_graph.calls.call_path import ENDED, LEFT, STALE, USUAL, CallPath
from amp_graph.calls.call_state import CallState
from amp_graph.calls.convertible import initialize
from amp_graph.calls.fallback import Fallback
from amp_graph.calls.first_calls import FirstCalls
from amp_graph.calls.model_graphs import ModelGraphs
from amp_graph.calls.outside import may_be_ours
from amp_graph.capture.breaks import depends_on_data, why_not_captured
from amp_graph.capture.dynamo import (
    CAPTURED_TOO_OFTEN,
    OFF,
    is_of_capture,
    is_off,
)
from amp_graph.errors import MISTAKES, warn
from amp_graph.modules import Entry
from amp_graph.snapshots import ModelSnapshot
from amp_graph.weak_references import weak_method


class CapturedCalls:
    """The calls of a model at one entry: by its captures, or those of a model that is alike,
    compiled by `compiler`; by its own code where there are none."""

    def __init__(self, entry: Entry, compiler: Compiler):
        self._entry, self._record = entry, compiler.record
        self.fallback = Fallback(entry, compiler.policy, compiler.record)
        self._graphs = ModelGraphs(entry, compiler)
        self.policy_id = self._graphs.policy_id
        self._budget = self._graphs.budget
        self._path = CallPath(self._graphs, compiler)
        self._first = FirstCalls(self._graphs, compiler, self._path, self.fallback)

    def graphs_in_force(self) -> set[int]:
        """Return the places in the record of the graphs that a call may run; until something is
        captured anew, those that were captured before."""
        if self._path.state in ENDED:
            return set()
        return self._path.places()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        path = self._path
        if not self._first.are_over:
            if self._entry.is_call:
                initialize(self._entry.module, args, kwargs)
            if path.state not in ENDED and is_off():
                self._fall_back((OFF, ""), "is not captured", at_once=True)
        if path.state is not LEFT:
            path.choose()
        if path.state is LEFT:
            return path.fallback(*args, **kwargs)
        before, uncaptured = CallState(), None
        before.begun, before.charged = self._budget.this_thread.begun, self._budget.charged
        before.runs, before.records = self._graphs.this_thread.runs, torch.is_grad_enabled()
        before.strategy = path.strategy
        self._first.begin(before)
        watch = before.watch
        run = path.run if watch is None else partial(self._graphs.run_watched, watch, path.run)
        try:
            result = run(*args, **kwargs)
        except BaseException as error:
            if watch is not None:
                self._first.begin_again()
            is_new, was_told = before.snapshot is not None, self._budget.was_told
            if not may_be_ours(error, watch is not None, is_new, was_told):
                is_of_model = isinstance(error, Exception)  # and no interrupt
                self._begin_again(is_of_model and self._budget.this_thread.begun != before.begun)
                raise
            uncaptured, before.watch = error, None
        if uncaptured is not None:  # outside of the handler: its error is no part of the user's own
            result = self._run_uncaptured(uncaptured, before, args, kwargs)
        has_captured = self._budget.this_thread.begun != before.begun
        is_counted = self._budget.unpaid or self._budget.failed
        if has_captured or is_counted or not self._first.are_over or before.watch is not None:
            self._look_back(before, has_captured)
        return result

    def _begin_again(self, has_captured: bool = True) -> None:
        """Begin anew after a call that raised, which tells nothing of other calls. Where an
        operator refused its arguments, a number for a tensor, Dynamo has left its call to Python
        whatever these are: it guards none of them."""
        if self._budget.this_thread.has_refused:
            self._budget.take_skipped()
            self._path.end_captures()
        self._budget.end_failed_call(has_captured)
        self._stop_if_too_many()

    def _look_back(self, before: CallState, has_captured: bool) -> None:
        """Look, after a call, whether all that was asked for happened, and whether to go on so."""
        runs = self._graphs.this_thread.runs - before.runs
        tells = self._first.conclude(before)
        self._budget.end_call(has_captured, before.charged)
        if has_captured or not tells:
            self._first.begin_again()
        if has_captured or not tells or self._path.state is STALE:  # others are to be captured
            runs = 0
        self._stop_if_too_many(runs)

    def _stop_if_too_many(self, runs: int = 0) -> None:
        """Capture no more if that costs more than it is worth: some Python value is another in call
        after call (a list that grows, the layers that are chosen), or so many small graphs ran in a
        call that the model's own code is faster."""
        if self._path.state in ENDED:
            return
        if (why := self._budget.why_too_many()) is not None:
            self._fall_back(why, "is no longer captured")
        elif (too_small := self._graphs.why_too_small(runs, self._first.between)) is not None:
            self._leave_small_graphs(too_small, runs)
        elif (slow := self._budget.why_so_slow()) is not None:
            warn(f"{self._entry.name} {slow}")

    def _fall_back(self, why: tuple[str, str], what: str, at_once: bool = False) -> None:
        """Run the model's own code from now on."""
        reason, advice = why
        index = self.fallback.stand_in(reason)
        self._path.end_with(self.fallback.run(index), at_once)
        warn(f"{self._entry.name} {what} and {self._record.plans[index].otherwise}{advice}")

    def _leave_small_graphs(self, why: str, runs: int) -> None:
        """Leave the graphs that are in float32, if the others are worth it. Else run the model's
        own code, until autocast fails in it: the graphs work."""
        if self._graphs.leave_smallest(runs):
            self._path.capture_anew()
            return
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
        if self._graphs.hooks.are_for_all():  # a FLOP counter's, which later calls may be without
            self._begin_again()
            return self.fallback.run_uncaptured(*args, **kwargs)
        is_other = is_of_capture(error) and not isinstance(error, CAPTURED_TOO_OFTEN)
        has_run = self._graphs.this_thread.runs != before.runs
        may_help = depends_on_data(error) or (is_other and not has_run)
        untried = before.strategy.untried(not self._first.are_over, may_help)
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
            self.fallback.not_under_autocast(self._first.between, why)
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
        if self._first.may_have_set_up(snapshot):
            self._record.drop(index)
            self._begin_again()
            return result
        if self._record.plans[index].autocast is planned.autocast:  # else it was told why not
            warn(f"{self._entry.name} {planned.otherwise}")
        self._path.end_with(fallback, at_once=True)
        return result
