"""The graphs that a model is called by: its own, or those of one like it."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from amp_graph.backend.build import Built, written_inputs
from amp_graph.backend.compiler import Compiler
from amp_graph.calls.compiled_by_others import AROUND
from amp_graph.calls.outside import OutsideWatch
from amp_graph.capture.autocast_regions import is_in_none
from amp_graph.capture.budget import CaptureBudget
from amp_graph.capture.captures import Assembled, captured_names
from amp_graph.capture.dynamo import EACH_SIZE_APART
from amp_graph.capture.hooks import Hooks, calls_others
from amp_graph.capture.narrow_inputs import taking_narrow, widen_inputs
from amp_graph.custom_functions import behind_functions
from amp_graph.errors import warn
from amp_graph.modules import Entry, Run, has_backward_hooks, has_compiled_forward
from amp_graph.outer_autocast import autocast_devices, without_autocast
from amp_graph.policy import Policy

# Graphs in a call, and operators in a graph: so many of fewer take longer than under autocast
# (scripts/call_overhead.py --calls 20). Half of that where only those in graphs count in which
# something is low: others save nothing.
MANY, FEW, FEW_LOW = 16, 8, 4


class Graph(NamedTuple):
    """A graph as built; the inputs that it takes widened; and whether it calls modules that are no
    part of the model."""

    built: Built
    widened: list[int]
    calls_others: bool


class CallsOfThread(threading.local):
    """How far one thread is in its call of a model.

    runs: how often a graph ran.
    watch: watches code outside of graphs; None if nobody does.
    behind_first: to be called once the first graph of the call has run; outside of autocast regions
        of the model's own, and of custom functions, for which autocast is off.
    """

    runs = 0
    watch: OutsideWatch | None = None
    behind_first: Callable[[], None] | None = None


class ModelGraphs:
    """The graphs that one model is called by where it is entered, built and counted."""

    def __init__(self, entry: Entry, compiler: Compiler):
        self.entry, self.hooks = entry, Hooks(entry.module)
        self.budget = CaptureBudget(entry.name, compiler.record.cost)
        self._shared_policy = one_for_all(compiler.policy)
        self.policy_id = id(self._shared_policy)
        self.this_thread = CallsOfThread()
        self._compiler = compiler
        self._runs_before: Counter[int] = Counter()  # of graphs, when they were last judged
        self._may_be_too_small = True

    @property
    def module(self) -> nn.Module:
        return self.entry.module

    def run_watched(self, watch: OutsideWatch, run: Run, /, *args: Any, **kwargs: Any) -> Any:
        """Run a call under a watch."""
        before, self.this_thread.watch = self.this_thread.watch, watch
        hooks = self.hooks.number()
        try:
            with watch:
                result = run(*args, **kwargs)
            watch.adds_hooks = self.hooks.number() > hooks
            return result
        finally:
            self.this_thread.watch = before

    @contextlib.contextmanager
    def behind_first(self, do: Callable[[], None]) -> Iterator[None]:
        """Put something around a call that is to happen once its first graph has run."""
        before, self.this_thread.behind_first = self.this_thread.behind_first, do
        try:
            yield
        finally:
            self.this_thread.behind_first = before

    def settings(self, is_first: bool) -> Mapping[str, Any]:
        of_sizes = EACH_SIZE_APART if self.budget.sizes_take_long else {}
        return {**of_sizes, **self.hooks.settings(is_first)}

    def why_too_small(self, runs: int, between: int | None) -> str | None:
        """Why the graphs are too small to be worth entering, in a call in which `runs` of them ran
        (those of a detector's boxes, say, in which nothing is low); else None.

        between: where the record has the code between them, which may run under autocast. If
            nothing is low there nor in a graph, the model is in float32 for a reason, and is left
            as it is.

        Not told where hooks would have that code run in float32.
        """
        policy = self._compiler.policy
        if policy.names_parts or policy.lists or policy.removed:  # which autocast knows nothing of
            return None
        if runs < MANY or not self._may_be_too_small:
            return None
        (entered, operators), (_, low) = self._work(), self._work(in_low=True)
        is_low_between = between is not None and self._compiler.plans[between].autocast
        is_worth_it = operators >= FEW * entered and low >= FEW_LOW * entered
        if is_worth_it or not (low or is_low_between) or has_backward_hooks(self.module):
            return None
        return f"to enter {runs} graphs takes longer than it saves: {_how_few(low / entered)}"

    def _work(self, in_low: bool = False) -> tuple[int, int]:
        """Return how many graphs ran since they were last judged, and how many operators in them;
        `in_low`: only those graphs in which something is low."""
        ran, plans = self._compiler.record.runs - self._runs_before, self._compiler.plans
        counted = {i: n for i, n in ran.items() if plans[i].has_low or not in_low}
        return sum(counted.values()), sum(n * plans[i].operators for i, n in counted.items())

    def leave_smallest(self, runs: int) -> bool:
        """Leave to Python those graphs in which nothing is low, if without them the graphs of a
        call, of which `runs` were too small, are worth entering. Returns whether that is so. If
        not, it is not asked again whether they are too small: they may be entered for all that,
        where the model's own code fails under autocast."""
        (entered, _), (low_entered, low) = self._work(), self._work(in_low=True)
        are_few, are_large = low_entered * runs < MANY * entered, low >= FEW * low_entered
        self._runs_before = self._compiler.record.runs.copy()
        is_worth_it = low > 0 and (are_few or are_large)
        self._may_be_too_small = is_worth_it and self.budget.leave_pieces_in_float32()
        return self._may_be_too_small

    def build(self, graph: fx.GraphModule, example_inputs: list[Any]) -> Graph:
        self.hooks.guard_new()
        if self.entry.is_call and has_compiled_forward(self.module):
            self._compiler.record.warn_once(f"{self.entry.name} {AROUND}")
        names, widened = captured_names(self.entry), widen_inputs(graph)
        inputs = [x.float() if i in widened else x for i, x in enumerate(example_inputs)]
        build = without_autocast(self._compiler.build)
        # Saved-tensor hooks of the user (checkpoint's, say) are not for the tensors of a trace.
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, _as_it_is):
            built = build(graph, inputs, names)
        return Graph(built, widened, calls_others(graph, names.modules))

    def assemble(self, graph: Graph) -> Assembled:
        record, here = self._compiler.record, self.this_thread
        index, run = self._compiler.assemble(graph.built)
        plan = record.plans[index]
        captured = self.budget.this_thread
        operators = max(plan.operators, plan.autocast)
        captured.operators += operators
        captured.converted += plan.converts
        if plan.autocast and not any(map(torch.is_autocast_enabled, autocast_devices())):
            # Else it was said of all the code around.
            warn(f"{record.graph(index)} {plan.otherwise}")
        if graph.widened:
            written = written_inputs(plan) if plan.facts else frozenset(graph.widened)
            run = taking_narrow(run, graph.built.original, graph.widened, written)
        self.hooks.follow(graph.calls_others)

        def counted(*args: Any) -> Any:
            here.runs += 1
            captured.ran += operators
            record.runs[index] += 1
            if here.watch is None:
                result = run(*args)
            else:
                with here.watch.paused():
                    result = run(*args)
            if here.behind_first is not None and is_in_none():
                do, here.behind_first = here.behind_first, None
                behind_functions(do)
            return result

        return Assembled(index, counted)


def _how_few(low: float) -> str:
    """Operators in graphs in which something is low, for each graph that is entered."""
    if not low:
        return "nothing in them is in low precision"
    many = f"{low:.1f} operators" if low >= 0.95 else "less than one operator"
    return f"graphs in which something is in low precision have {many} for each that is entered"


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


_in_use: list[weakref.ref[Policy]] = []


def one_for_all(policy: Policy) -> Policy:
    """Return one object for all policies that are equal, for as long as one of them is in use."""
    _in_use[:] = [reference for reference in _in_use if reference() is not None]
    for reference in _in_use:
        if (known := reference()) is not None and known == policy:
            return known
    _in_use.append(weakref.ref(policy))
    return policy
