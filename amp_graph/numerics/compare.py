"""`compare`: a model in float32 and in mixed precision side by side, node by node.

Both runs get the same batch, weights and random numbers. The values of the float32 run are kept
until the mixed run has passed them, so that the memory needed is that of all activations.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from amp_graph.calls.convertible import check_model
from amp_graph.dtypes import dtype_name
from amp_graph.errors import AmpGraphError
from amp_graph.files import as_path, writing
from amp_graph.inspection.spelling import op_name
from amp_graph.ir import NodeFacts, Plan
from amp_graph.numerics.observer import Observer, Place
from amp_graph.numerics.outcomes import not_finite_shares, outcome_errors
from amp_graph.numerics.outputs import check_loss
from amp_graph.numerics.rerun import Batch, Loss, Rerun, rerun_of
from amp_graph.numerics.statistics import Statistics, exponents, statistics
from amp_graph.plans.plain_json import encode
from amp_graph.reasons import dtype_of, why_nothing_is_low

FORMAT = "amp_graph comparison"
SCHEMA = 1
ALONE = "the model ran otherwise in float32, before; not compared"


@dataclass(frozen=True)
class NodeNumerics:
    """One operator of a graph. `added` is how much larger the error of its value is than that of
    any of its operands: where an error first appears. `call` counts the graphs that ran."""

    node: str
    label: str
    operator: str
    module: str
    source: str
    code: str
    graph: int
    body: str
    call: int
    low: bool
    dtype: str
    forward: Statistics
    backward: Statistics | None
    added: float

    @property
    def faults(self) -> float:
        """The largest share of values or gradients that overflow or underflow."""
        sides = [s for s in (self.forward, self.backward) if s is not None]
        return max(max(s.underflow, s.overflow) for s in sides)

    @property
    def badness(self) -> tuple[bool, float, float]:
        """What sorts the worst first: overflow, then the error that begins here, then underflow."""
        backward = self.backward
        overflow = self.forward.overflow + (backward.overflow if backward else 0.0)
        return overflow > 0, self.added, self.faults


@dataclass(frozen=True, repr=False)
class Comparison:
    """What `compare` returns.

    nodes: in order of execution. outputs, loss, gradients: relative errors of the model's outputs,
    its loss and the gradients of its parameters; infinite where one is not finite, NaN where there
    is none to compare. not_finite: the share of "outputs", "loss" and "gradients" that is not
    finite in float32 itself, and so is not compared.
    fallbacks: the graphs and bodies that run otherwise than asked, and why; of those that were not
    looked into there are no nodes. nothing: why nothing was converted, if so.
    gradient_exponents: how many gradients (of values and parameters, float32 run, multiplied by
    the loss scale) have each exponent of 2.
    """

    model: str
    dtype: str
    loss_scale: float
    outputs: float
    loss: float
    gradients: float
    nodes: tuple[NodeNumerics, ...]
    gradient_exponents: Mapping[int, int] = field(default_factory=dict)
    gradient_zeros: int = 0
    fallbacks: tuple[str, ...] = ()
    nothing: str = ""
    not_finite: Mapping[str, float] = field(default_factory=dict)

    def within(self, bound: float) -> bool:
        """Whether the errors of outputs and gradients, as far as there are any, are at most
        `bound`. Not if there are none, or float32 itself has gradients that are not finite."""
        sides = {"outputs": self.outputs, "gradients": self.gradients}
        errors = [e for side, e in sides.items() if side in self.not_finite or not math.isnan(e)]
        is_sound = bool(errors) and "gradients" not in self.not_finite
        return is_sound and all(error <= bound for error in errors)

    def worst(self, count: int = 10) -> tuple[NodeNumerics, ...]:
        """The nodes that do the most harm, worst first."""
        return tuple(sorted(self.nodes, key=lambda n: n.badness, reverse=True)[:count])

    def underflows(self, count: int = 10) -> tuple[NodeNumerics, ...]:
        """The nodes with the largest share of values or gradients that became zero."""
        lost = [n for n in self.nodes if _underflow(n) > 0]
        return tuple(sorted(lost, key=_underflow, reverse=True)[:count])

    def first_above(self, bound: float) -> NodeNumerics | None:
        """The first node in order of execution whose value is off by more than `bound`."""
        return next((n for n in self.nodes if n.forward.error > bound), None)

    def save(self, path: str | Path) -> None:
        """Write all figures as JSON. Raises AmpGraphError if the file cannot be written."""
        table = {"format": FORMAT, "schema": SCHEMA, **encode(self)}
        with writing(file := as_path(path)):
            file.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")

    def plot(self, path: str | Path) -> None:
        """Draw the histogram of gradient exponents as SVG, with float16's range marked. Raises
        AmpGraphError for a file of another kind, or that cannot be written."""
        check_drawing(path)
        from amp_graph.numerics.report import histogram

        with writing(file := as_path(path)):
            file.write_text(histogram(self), encoding="utf-8")

    def __str__(self) -> str:
        from amp_graph.numerics.report import text

        return text(self)

    __repr__ = __str__

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from amp_graph.numerics.report import table

        yield table(self, options.max_width)


def compare(
    model: nn.Module,
    batch: Batch,
    *,
    loss: Loss | None = None,
    loss_scale: float = 1.0,
    policy: Any = None,
) -> Comparison:
    """Run `model` on one batch in float32 and in mixed precision, forward and backward, and
    compare every node.

    `batch` is a tensor, positional arguments as a sequence, or keyword arguments as a mapping.
    `loss` makes a scalar of the output; without it the output's own loss is used, or the mean
    square of the outputs. Backward starts from `loss_scale` times the loss. The model, its
    gradients and the random state stay as they were; a model that is not converted is compared
    with what `convert(model, policy=policy)` would make of it. Raises AmpGraphError for a batch,
    loss or scale that is none, or a model that `convert` refuses.
    """
    check_model(model, "compare()")
    check_loss(loss, loss_scale)
    rerun, kept = rerun_of(model, policy), Reference()
    reference = rerun.run(batch, loss, kept, mixed=False, loss_scale=loss_scale)
    ran, seen = rerun.ran, Beside(rerun, kept)
    mixed = rerun.run(batch, loss, seen, mixed=True, loss_scale=loss_scale)
    outputs, lost, gradients = outcome_errors(reference, mixed)
    by_graph = rerun.plans()
    plans = [*by_graph.values()]
    fallbacks = [f for i, plan in by_graph.items() for f in _fallbacks(f"graph{i}", plan)]
    fallbacks += [f"graph{i}: {ALONE}" for i in dict.fromkeys(rerun.ran) if i not in ran]
    for gradient in reference.gradients.values():
        kept.count(gradient * loss_scale)
    return Comparison(
        model=type(model).__name__,
        dtype=dtype_name(dtype_of(plans)),
        loss_scale=loss_scale,
        outputs=outputs,
        loss=lost,
        gradients=gradients,
        nodes=tuple(seen.nodes()),
        gradient_exponents=dict(sorted(kept.exponents.items())),
        gradient_zeros=kept.zeros,
        fallbacks=tuple(fallbacks),
        nothing="" if any(p.converts for p in plans) else why_nothing_is_low(plans),
        not_finite=not_finite_shares(reference),
    )


def _fallbacks(name: str, plan: Plan) -> Iterator[str]:
    if plan.otherwise is not None:
        yield f"{name}: {plan.otherwise}{'' if plan.facts else '; not looked into'}"
    for inside, body in plan.bodies.items():
        yield from _fallbacks(f"{name}.{inside}", body)


def check_drawing(path: str | Path) -> None:
    """Refuse a file for `Comparison.plot` that is to be of another kind. Raises AmpGraphError."""
    if as_path(path).suffix.lower() not in ("", ".svg"):
        raise AmpGraphError(f"{path}: the drawing is SVG; give a file that ends in .svg")


class Reference(Observer):
    """Keeps the values and gradients of the float32 run."""

    def __init__(self) -> None:
        self.values: dict[Place, torch.Tensor] = {}
        self.gradients: dict[Place, torch.Tensor] = {}
        self.exponents: Counter[int] = Counter()
        self.zeros = 0

    def value(self, place: Place, node: fx.Node, value: Any) -> None:
        is_parameter = isinstance(value, torch.nn.Parameter)
        if node.op in ("call_function", "placeholder") and _is_float(value) and not is_parameter:
            self.values[place] = value.detach().clone()

    def gradient(self, place: Place, gradient: torch.Tensor) -> None:
        if place in self.values:  # those of parameters are counted once, from the outcome
            self.gradients[place] = gradient.detach().clone()
            self.count(gradient)

    def count(self, gradient: torch.Tensor) -> None:
        self.exponents += exponents(gradient)
        self.zeros += int((gradient == 0).sum())


class Beside(Observer):
    """Compares the values and gradients of the mixed run with those kept."""

    def __init__(self, rerun: Rerun, kept: Reference) -> None:
        self.rerun, self.kept = rerun, kept
        self.forward: dict[Place, tuple[fx.Node, str, Statistics]] = {}
        self.backward: dict[Place, Statistics] = {}

    def value(self, place: Place, node: fx.Node, value: Any) -> None:
        reference = self.kept.values.get(place)
        if reference is None or not _is_float(value) or value.shape != reference.shape:
            return
        self.forward[place] = (node, dtype_name(value.dtype), statistics(reference, value))

    def gradient(self, place: Place, gradient: torch.Tensor) -> None:
        reference = self.kept.gradients.get(place)
        if reference is not None and place in self.forward:
            self.backward[place] = statistics(reference, gradient)

    def nodes(self) -> list[NodeNumerics]:
        """The operators that compute; a view has the numbers of what it looks at."""
        places = [p for p, (node, _, _) in self.forward.items() if node.op == "call_function"]
        return [self._node(p) for p in places if not self._is_view(p)]

    def _is_view(self, place: Place) -> bool:
        facts = self.rerun.plan_at(place).facts[place.name]
        return facts.is_view and not facts.writes

    def _node(self, place: Place) -> NodeNumerics:
        node, dtype, forward = self.forward[place]
        plan = self.rerun.plan_at(place)
        facts: NodeFacts = plan.facts[place.name]
        return NodeNumerics(
            node=place.name,
            label=facts.label,
            operator=op_name(facts.op),
            module=facts.module_path,
            source=facts.source,
            code=facts.code,
            graph=place.graph,
            body=place.body.strip("/"),
            call=place.call,
            low=place.name in plan.low,
            dtype=dtype,
            forward=forward,
            backward=self.backward.get(place),
            added=max(0.0, _minus(forward.error, self._inherited(place, node))),
        )

    def _inherited(self, place: Place, node: fx.Node) -> float:
        """The largest error among the values that the node reads, casts looked through."""
        return max((self._error(place, operand) for operand in node.all_input_nodes), default=0.0)

    def _error(self, place: Place, node: fx.Node) -> float:
        at = place.at(node)
        if at in self.forward:
            error = self.forward[at][2].error
            return 0.0 if math.isnan(error) else error
        sources = node.all_input_nodes
        return self._error(place, sources[0]) if len(sources) == 1 else 0.0


def _minus(error: float, inherited: float) -> float:
    return 0.0 if inherited == float("inf") else error - inherited


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 0


def _underflow(node: NodeNumerics) -> float:
    return max(node.forward.underflow, node.backward.underflow if node.backward else 0.0)
