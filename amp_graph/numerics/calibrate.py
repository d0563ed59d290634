"""`calibrate`: few nodes to keep in float32 so that a model's error meets a bound.

    error of the plan as it is     0.9
    with everything in float32     0
    suspects, worst first          mul, linear_2, gelu, ...
    shortest list that suffices    mul, linear_2            bisection
    without the needless           mul                      delta debugging

Each trial rewrites the captured graphs with the nodes in question denied, and runs the batches.
The set found is minimal in this sense: with any one of its nodes back in low precision, the bound
is not met.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from amp_graph.backend.rewrite import rewrite, saved_pins
from amp_graph.batches import Batch
from amp_graph.calls.convertible import check_model
from amp_graph.errors import AmpGraphError
from amp_graph.inspection.spelling import line_of, plural
from amp_graph.inspection.terminal import Shown
from amp_graph.ir import Color, NodeFacts, Paint, Plan
from amp_graph.numerics.compare import Beside, Reference, check_reference, outcome_errors
from amp_graph.numerics.node_numerics import NodeNumerics
from amp_graph.numerics.outputs import check_bound, check_loss
from amp_graph.numerics.rerun import Loss, Outcome, Rerun, rerun_of
from amp_graph.numerics.smallest import smallest
from amp_graph.numerics.watched_graph import Observer, Place
from amp_graph.plans.pins import Pins
from amp_graph.plans.plan_file import PlanSource, save_plan
from amp_graph.policy import PolicySource
from amp_graph.reasons import why_inexact
from amp_graph.rules import Rule

NEEDED = "needed to meet the bound"
NOTHING = Pins({}, False, "no plan")
SLIGHT = 0.01  # a smaller share of underflow is not worth naming as the reason

Node = tuple[int, str, str]
"""A node that could be denied: its graph, the path of the body in it, its name."""
Progress = Callable[[int, float], None]


@dataclass(frozen=True, repr=False)
class Calibration(Shown):
    """The result of `calibrate`.

    plans: for `convert(model, plan=...)`; denied nodes have the rule "calibrated" and the reason.
    denied: the denied nodes, as (graph, node, reason).
    before, after: the error of the plan as it was and as it is; `after` is at most `bound`.
    trials: how many plans were tried.
    places: the module and the line of each denied node, in words.
    """

    plans: tuple[Plan, ...]
    denied: tuple[tuple[int, str, str], ...]
    bound: float
    before: float
    after: float
    trials: int
    places: tuple[str, ...] = ()

    def save(self, path: str | Path) -> None:
        """Write the plans to a file."""
        save_plan(self.plans, path)

    def __str__(self) -> str:
        denied, trials = len(self.denied), self.trials
        lines = [
            f"error {_spelled(self.before, self.bound)} before, "
            f"{_spelled(self.after, self.bound)} after; bound {self.bound:g}; {denied} "
            f"{plural(denied, 'node')} denied in {trials} {plural(trials, 'trial')}"
        ]
        lines += [
            f"  graph {graph}  {name}{place}: {reason}"
            for (graph, name, reason), place in zip(self.denied, self.places, strict=True)
        ]
        return "\n".join(lines)


def calibrate(
    model: nn.Module,
    batches: Sequence[Batch],
    bound: float,
    *,
    loss: Loss | None = None,
    loss_scale: float = 1.0,
    policy: PolicySource = None,
    plan: PlanSource | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Find nodes to deny, none of which could be left out, so that on each of `batches` the
    relative errors of outputs and of gradients of parameters are at most `bound`, and all finite.

    For `loss`, `loss_scale`, `policy` and `plan` see `compare`. `progress` is told the number of
    the trial and its error. Raises AmpGraphError if nothing can be denied that helps, nothing can
    be compared or float32 itself is not finite, for a bound that is negative or not a number, and
    for a model that `convert` refuses, and PlanError as `compare` does.
    """
    check_model(model, "calibrate()")
    check_loss(loss, loss_scale)
    _check(batches, bound)
    rerun = rerun_of(model, policy, plan)
    search = _Search(rerun, list(batches), loss, loss_scale, bound, progress)
    before = search.error(())
    chosen: tuple[Node, ...] = ()
    reasons: dict[Node, str] = {}
    if before > bound:
        reasons = search.suspects()
        chosen = smallest(tuple(reasons), search.meets)
    after = search.error(chosen)
    if after > bound:
        raise AmpGraphError(
            f"the bound {bound:g} cannot be met: with all {len(reasons)} low-precision nodes in "
            f"float32 the error is {after:g}. {why_inexact(rerun.plans())}"
        )
    denied = tuple((n[0], _path(n[1], n[2]), reasons[n]) for n in chosen)
    places = tuple(_place(rerun.plan_at(Place(0, *node)).facts[node[2]]) for node in chosen)
    plans = search.plans(chosen, reasons)
    return Calibration(plans, denied, bound, before, after, search.trials, places)


def _check(batches: Any, bound: float) -> None:
    check_bound(bound)
    if isinstance(batches, (torch.Tensor, Mapping)) or not isinstance(batches, Iterable):
        raise AmpGraphError(
            f"calibrate takes a list of batches, not one {type(batches).__name__}; give [batch]"
        )


@dataclass
class _Search:
    """The trials made so far, by the set of nodes denied."""

    rerun: Rerun
    batches: list[Batch]
    loss: Loss | None
    loss_scale: float
    bound: float
    progress: Progress | None
    references: list[Outcome] = field(default_factory=list)
    saved: dict[int, Pins] = field(default_factory=dict)  # of the graphs that were rewritten
    known: dict[frozenset[Node], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.batches:
            raise AmpGraphError("calibrate needs at least one batch")
        self.references = [self._run(batch, mixed=False) for batch in self.batches]
        for number, reference in enumerate(self.references):
            check_reference(reference, number)

    @property
    def trials(self) -> int:
        return len(self.known)

    def meets(self, denied: Sequence[Node]) -> bool:
        return self.error(denied) <= self.bound

    def error(self, denied: Sequence[Node]) -> float:
        """The largest error of outputs and gradients on any batch with these nodes denied."""
        key = frozenset(denied)
        if key not in self.known:
            self._apply(denied)
            self.known[key] = max(self._errors())
            if self.progress is not None:
                self.progress(len(self.known), self.known[key])
        return self.known[key]

    def suspects(self) -> dict[Node, str]:
        """Every node in low precision with the harm it does, worst first."""
        self._apply(())
        worst: dict[Node, NodeNumerics] = {}
        for batch in self.batches:
            kept = Reference()
            self._run(batch, kept, mixed=False)
            seen = Beside(self.rerun, kept)
            self._run(batch, seen, mixed=True)
            for found in seen.nodes():
                node = found.graph, found.body, found.node
                if node not in worst or found.badness > worst[node].badness:
                    worst[node] = found
        low = [n for i, plan in self.rerun.plans().items() for n in _low(plan, i)]
        ranked = sorted(low, key=lambda n: _harm(worst.get(n)), reverse=True)
        return {n: _reason(worst.get(n)) for n in ranked}

    def plans(self, denied: Sequence[Node], reasons: Mapping[Node, str]) -> tuple[Plan, ...]:
        """The plans with these nodes denied, and why."""
        return tuple(self._rewritten(i, denied, reasons)[0] for i in self.rerun.plans())

    def _errors(self) -> list[float]:
        errors = []
        for batch, reference in zip(self.batches, self.references, strict=True):
            outputs, _, gradients = outcome_errors(reference, self._run(batch, mixed=True))
            errors += [e for e in (outputs, gradients) if not math.isnan(e)]
        return errors

    def _run(self, batch: Batch, observer: Observer | None = None, *, mixed: bool) -> Outcome:
        return self.rerun.run(batch, self.loss, observer, mixed=mixed, loss_scale=self.loss_scale)

    def _apply(self, denied: Sequence[Node]) -> None:
        @cache
        def replacement(index: int) -> fx.GraphModule | None:
            return self._rewritten(index, denied, {})[1]

        self.rerun.replacement = replacement

    def _rewritten(
        self, index: int, denied: Sequence[Node], reasons: Mapping[Node, str]
    ) -> tuple[Plan, fx.GraphModule | None]:
        """A graph's plan and what runs it, if any of its nodes, or of those that it is like, are
        denied."""
        compiler, first = self.rerun.compiler, self.rerun.first_of[index]
        plan, graphs = compiler.plans[index], compiler.graphs[index]
        paints = {
            (body, name): Paint(Color.DENY, Rule.CALIBRATED, reasons.get((graph, body, name), ""))
            for graph, body, name in denied
            if graph == first
        }
        if graphs is None or plan.fallback is not None or not paints:
            return plan, None
        policy = replace(compiler.policy, dtype=plan.dtype)
        if first not in self.saved:
            found = saved_pins(graphs[0], compiler.saved, compiler.policy, compiler.lists)
            self.saved[first] = found or NOTHING
        pins = _pins(plan, self.saved[first], paints)
        module, rewritten = rewrite(graphs[0], policy, compiler.lists, pins)
        return rewritten, module


def _pins(plan: Plan, saved: Pins, paints: Mapping[tuple[str, str], Paint], body: str = "") -> Pins:
    """The decisions of the plan that the model follows, and those of `paints`."""
    own = {name: p for (path, name), p in paints.items() if path == body}
    bodies = {
        name: _pins(inner, saved.bodies.get(name, NOTHING), paints, _path(body, name))
        for name, inner in plan.bodies.items()
    }
    return Pins({**saved.paints, **own}, False, "calibrate", bodies, is_trial=True)


def _low(plan: Plan, graph: int, body: str = "") -> list[Node]:
    """The nodes of a plan that could be denied."""
    own = [
        (graph, body, name)
        for name, f in plan.facts.items()
        if name in plan.low and f.op != "getitem"
    ]
    inner = [
        node
        for name, plan_inside in plan.bodies.items()
        for node in _low(plan_inside, graph, _path(body, name))
    ]
    return own + inner


def _harm(node: NodeNumerics | None) -> tuple[bool, float, float]:
    return node.badness if node is not None else (False, 0.0, 0.0)


def _reason(node: NodeNumerics | None) -> str:
    if node is None:
        return NEEDED
    sides = [("values", node.forward)]
    sides += [("gradients", node.backward)] if node.backward is not None else []
    for what, side in sides:
        if side.overflow:
            return f"{side.overflow:.1%} of its {what} overflow"
    for what, side in sides:
        if side.underflow > SLIGHT:
            return f"{side.underflow:.1%} of its {what} underflow"
    return f"{NEEDED}, adds an error of {node.added:.2g}" if node.added else NEEDED


def _place(facts: NodeFacts) -> str:
    module = f" in {facts.module_path}" if facts.module_path else ""
    return f"{module} at {line_of(facts.source)}" if facts.source else module


def _path(body: str, name: str) -> str:
    return f"{body}/{name}" if body else name


def _spelled(error: float, bound: float) -> str:
    """In as many digits as tell it from the bound, two at least."""
    if math.isinf(error):
        return "infinite"
    texts = [f"{error:.{digits}g}" for digits in range(2, 18)]
    return next((text for text in texts if (float(text) > bound) == (error > bound)), texts[-1])
