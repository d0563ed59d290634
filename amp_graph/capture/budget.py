"""Count the captures of a model, and tell when they cost more than they are worth.

Dynamo counts the frames that it captures for the whole process: those of other threads, of
functions that the user compiles, of converted models inside a converted model. None of these makes
the graphs of the model beside or around them any worse. Each model has a callback of its own with
Dynamo, which is called for all of its code, after a graph break as well, and for no other.

Private names of PyTorch used here:

    torch._dynamo.utils.counters    whether Dynamo was at work, or let the frame be, and why
    torch._dynamo.utils.get_compilation_metrics
                                    which guard failed, for which it was at work again
"""

from __future__ import annotations

import itertools
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import nn
from torch._dynamo.utils import counters, get_compilation_metrics

from amp_graph.callers import is_pythons
from amp_graph.capture import left_frames
from amp_graph.capture.breaks import each_once, in_other_words
from amp_graph.capture.long_captures import LONG, told_of
from amp_graph.capture.pieces import PART, Pieces
from amp_graph.dynamo_changes import breaks_inside
from amp_graph.dynamo_changes.recapture_reasons import OF_OTHERS
from amp_graph.dynamo_changes.slow_sizes import SizesTakeLong, patience
from amp_graph.dynamo_changes.told_compiling import take_told
from amp_graph.sums import Summable

MAX_CAPTURES = 16  # so many calls that captured a model, and are not repaid, are too many
LEAST = 1 / 4  # what one that captured a small part of what ran counts as
REPAID_BY = 4  # as many calls that captured nothing repay one that did
SOME = 8  # so many of those, if they took long, are worth a word before that
SLOW = 15.0  # seconds of capturing that count as one of those, behind the first call
PATIENCE, TIMES = 60.0, 2  # seconds for one capture; or so many times what all before it took
RAISED = "Observed exception"  # so begins why Dynamo lets such a frame be
REFUSED = "TypeError when making fake tensor call"  # and why it ends a graph at the call of one
GUARD = re.compile(r"\d+/\d+: (.*?)(?:\s+#.*# (\S+:\d+ in \S+).*)?$", re.MULTILINE)
OF_THE_PROCESS = re.compile(r"GLOBAL_STATE changed: (.*\S)")
MEANWHILE = "Unexpected recompilation"
_numbers = itertools.count()


@dataclass
class Cost(Summable):
    """The cost of capturing one model, or several.

    models: how many were captured by themselves, rather than called by captures of others alone.
    captures: calls in which something was captured.
    seconds: wall-clock time of capturing, to be told.
    work: processor time of capturing, in seconds, which other work on a machine does not change.
    """

    models: int = 0
    captures: int = 0
    seconds: float = 0.0
    work: float = 0.0


class CapturesOfThread(threading.local):
    """The captures of one thread's calls of a model.

    begun: how many frames were begun.
    operators, ran: on float32 tensors, in graphs that this call assembled, and that ran in it.
    work: processor time of its captures, in seconds.
    converted: how many graphs so far are not all in float32.
    raised: the code of frames that Dynamo left to Python because it saw an error of the model's.
    has_refused: whether it ended a graph in this call because an operator refuses its arguments.
    """

    begun = converted = 0

    def __init__(self) -> None:
        self.raised: list[CodeType] = []
        self.end_call()

    def end_call(self) -> None:
        """Begin to count for the next call; `begun` and `converted` go on."""
        self.operators, self.ran, self.work = 0, 0, 0.0
        self.has_refused = False
        self.raised.clear()
        breaks_inside.forget()


class CaptureBudget:
    """The budget of captures for one model: what they cost, and how far calls have repaid it.

    name: the model's, to be told.
    number: the model's, among all of the process.
    charged: calls that captured something; of several at once, which may have met the same, one.
    unpaid: charged calls that other calls have not repaid yet. One counts as the part of what ran
        in it that it captured, by operators; and as more if that took long.
    failed: calls in a row that raised, in which something was to be captured.
    cost: of all captures so far.
    sizes_take_long: whether each size is captured apart, as sizes that vary took too long.
    was_told: whether the model asked if it is compiled, and was told so.
    """

    def __init__(self, name: str, cost: Cost | None = None) -> None:
        self.name, self.number = name, next(_numbers)
        self.cost = cost or Cost()
        self.this_thread = CapturesOfThread()
        self.charged = 0
        self.unpaid = 0.0
        self._most = 1  # operators that a call captured
        self._pieces, self._leaves_any = Pieces(), False
        self.failed = 0
        self.sizes_take_long = self.was_told = False
        self._is_told = False  # that it takes long
        self.skipped: list[str] = []  # frames that run uncaptured, and why
        self.said = ""  # what Dynamo said last of what it cannot capture
        self.changed = ""  # the guard that failed last: "`len(module.seen) == 2` (net.py:7 in f)"

    def counted(self, code: CodeType, capture: Callable[[], Any]) -> Any:
        """Capture a frame of this code, one thread at a time: what Dynamo counts is for all."""
        result, began, work = None, time.perf_counter(), time.thread_time()
        operators, converted = self.this_thread.operators, self.this_thread.converted
        before = counters["frames"]["total"]
        breaks, reasons = counters["graph_break"].copy(), counters["unimplemented"].copy()
        try:
            with patience(self._patience()), told_of(self.name, self.cost.seconds):
                result = capture()
            return result
        except SizesTakeLong:
            self.sizes_take_long, self._is_told = True, False
            raise
        finally:
            work = time.thread_time() - work
            self.cost.seconds += time.perf_counter() - began
            self.cost.work += work
            self.this_thread.work += work
            self.was_told |= take_told()
            is_left = result is not None and result.guarded_code is None
            if counters["frames"]["total"] != before:
                self.this_thread.begun += 1
                changed = _failed_guard()
                self.changed = changed or self.changed
                if result is not None and not is_left:
                    operators = self.this_thread.operators - operators
                    is_converted = self.this_thread.converted != converted
                    self._pieces.add(code, operators, is_converted, changed)
                    if changed:
                        self._leave_pieces()
            new = [*(counters["unimplemented"] - reasons)]
            if any(reason.startswith(RAISED) for reason in new):
                self.this_thread.raised.append(code)
            said = [*(counters["graph_break"] - breaks), *new]
            self.this_thread.has_refused |= any(reason.startswith(REFUSED) for reason in said)
            if said:
                self.said = in_other_words(said[-1])
            if said and is_left and not is_pythons(code.co_filename):
                self.skipped.append(left_frames.note(code, said[-1]))

    def _patience(self) -> float:
        """Return how many seconds a capture may take over sizes that vary. In a first call all of
        them are known."""
        if self.sizes_take_long or not self.charged:
            return math.inf
        return max(PATIENCE, TIMES * self.cost.work)

    def _leave_pieces(self) -> bool:
        """Leave pieces of the model to Python that were captured anew: those that are in float32,
        and any others once captures were too many. Returns whether there were some."""
        return self._are_left(self._pieces.leave(PART * self._most if self._leaves_any else 0))

    def leave_pieces_in_float32(self) -> bool:
        """Leave all of these, however often they were captured. Returns whether there were some."""
        return self._are_left(self._pieces.leave_those_in_float32())

    def _are_left(self, left: Mapping[CodeType, str]) -> bool:
        self.skipped += [left_frames.told(code, why) for code, why in left.items()]
        return bool(left)

    def leaves(self, code: CodeType) -> bool:
        """Whether this piece of the model's code is left to Python. What it calls is captured."""
        return self._pieces.are_left(code)

    def end_call(self, has_captured: bool, charged: int) -> None:
        """Take note that a call of the model has ended, before which so many were `charged`."""
        here = self.this_thread
        operators, ran, work = here.operators, here.ran, here.work
        here.end_call()
        self.failed = 0
        self._most = max(self._most, operators)
        if not has_captured:
            self.unpaid = max(0.0, self.unpaid - 1 / REPAID_BY)
        elif self.charged == charged:
            slow = work / SLOW if self.charged else 0.0
            self.charged += 1
            self._charge(max(LEAST, min(operators / max(ran, 1), 1), slow))

    def end_failed_call(self, has_captured: bool) -> None:
        """Take note that a call has raised. It is captured again if it comes again."""
        self.try_again()
        self.this_thread.end_call()
        self.failed += has_captured
        if has_captured:
            self._charge(1)

    def _charge(self, part: float) -> None:
        """Charge a call that captured this part of what ran in it. Before that is too much, the
        pieces are left that had to be captured again and again."""
        self.cost.captures += 1
        self.unpaid += part
        if self.unpaid >= MAX_CAPTURES:
            self._leaves_any = True
            if self._leave_pieces():
                self.unpaid = 0.0

    def try_again(self) -> None:
        """Have Dynamo capture code again that it would leave alone for good after an error. An
        error tells nothing of other calls."""
        left_frames.try_again(self.this_thread.raised)
        self.this_thread.raised.clear()

    def why_too_many(self) -> tuple[str, str] | None:
        """Return why captures cost more than they are worth, and what may help; else None."""
        if self.failed >= MAX_CAPTURES:
            return "one call after another raised as it was captured", ""
        if self.unpaid < MAX_CAPTURES:
            return None
        return "it was captured anew again and again", self._what_changes()

    def why_so_slow(self) -> str | None:
        """Return, once, a warning about captures that take long, before they are too many."""
        is_slow = self.sizes_take_long or (self.cost.seconds >= LONG and self.unpaid >= SOME)
        if self._is_told or not is_slow:
            return None
        self._is_told = True
        if self.sizes_take_long:
            return (
                f"was captured for {self.cost.seconds:.0f} s, since PyTorch takes long over sizes "
                "that vary in it. Each size is captured apart from now on, as long as there are "
                "few: pad or resize to a few sizes"
            )
        return (
            f"was captured anew in call after call, for {self.cost.seconds:.0f} s so far, and is "
            f"no longer captured if that goes on{self._what_changes()}"
        )

    def _what_changes(self) -> str:
        advice = ". TORCH_LOGS=recompiles tells what changes in it at each call"
        if self.changed:
            advice += f"; before the last it was {self.changed}"
        return advice

    def why_nothing(self, model: nn.Module) -> str:
        """Return why nothing of a call of the model was captured."""
        self.skipped = self.skipped or left_frames.left_in(model)
        return "; ".join(each_once(self.skipped)) or self.said or "Dynamo does not say why"

    def take_skipped(self) -> list[str]:
        """Return the frames that were skipped since the last call of this, each with why."""
        skipped, self.skipped = self.skipped, []
        return skipped


def _failed_guard() -> str:
    """Return the guard for which Dynamo last captured anew; "" if there is none, as where another
    thread has captured the same meanwhile, or if it only says that another model was captured
    before."""
    metrics = get_compilation_metrics()
    reason = metrics[-1].recompile_reason if metrics else None
    found = GUARD.match(reason or "")
    if found is None or OF_OTHERS in found[1] or found[1].startswith(MEANWHILE):
        return ""
    guard, line = found.groups()
    if setting := OF_THE_PROCESS.match(guard):
        return f"a change of PyTorch's {setting[1]}"
    return f"`{guard}` ({line.rpartition('/')[2]})" if line else f"`{guard}`"
