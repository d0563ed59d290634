"""`compare`: a model in float32 and in mixed precision side by side, node by node.

Both runs get the same batch, weights and random numbers. The values of the float32 run are kept
until the mixed run has passed them, so that the memory needed is that of all activations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from amp_graph.batches import Batch
from amp_graph.calls.convertible import check_model
from amp_graph.capture.breaks import each_once
from amp_graph.dtypes import dtype_name
from amp_graph.errors import AmpGraphError
from amp_graph.inspection.spelling import short_op
from amp_graph.ir import NodeFacts, Plan
from amp_graph.numerics.comparison import Comparison
from amp_graph.numerics.node_numerics import NodeNumerics
from amp_graph.numerics.outputs import check_loss
from amp_graph.numerics.rerun import Loss, Outcome, Rerun, rerun_of
from amp_graph.numerics.statistics import (
    Statistics,
    exponents,
    not_finite,
    relative_error,
    statistics,
)
from amp_graph.numerics.watched_graph import Observer, Place
from amp_graph.plans.plan_file import PlanSource
from amp_graph.policy import PolicySource
from amp_graph.reasons import dtype_of, why_nothing_is_low

ALONE = "the model ran otherwise in float32, before; not compared"


def compare(
    model: nn.Module,
    batch: Batch,
    *,
    loss: Loss | None = None,
    loss_scale: float = 1.0,
    policy: PolicySource = None,
    plan: PlanSource | None = None,
) -> Comparison:
    """Run `model` on one batch in float32 and in mixed precision, forward and backward, and
    compare every node.

    `batch` is a tensor, positional arguments as a sequence, or keyword arguments as a mapping.
    `loss` makes a scalar of the output; without it the output's own loss is used, or the mean
    square of the outputs. Backward starts from `loss_scale` times the loss. Code between graphs
    runs in float32 both times. The model, its gradients and the random state stay as they were; a
    model that is not converted is compared with what `convert(model, policy=policy, plan=plan)`
    would make of it. Raises AmpGraphError for a batch, loss or scale that is none, or a model that
    `convert` refuses or that holds no numbers, and PlanError for a plan that is not for the model.
    """
    check_model(model, "compare()")
    check_loss(loss, loss_scale)
    rerun, kept = rerun_of(model, policy, plan), Reference()
    reference = rerun.run(batch, loss, kept, mixed=False, loss_scale=loss_scale)
    ran, seen = rerun.ran, Beside(rerun, kept)
    mixed = rerun.run(batch, loss, seen, mixed=True, loss_scale=loss_scale)
    outputs, lost, gradients = outcome_errors(reference, mixed)
    by_graph = rerun.plans()
    plans = [*by_graph.values()]
    fallbacks = [f for i, plan in by_graph.items() for f in _fallbacks(f"graph {i}", plan)]
    fallbacks += [f"graph {i}: {ALONE}" for i in dict.fromkeys(rerun.ran) if i not in ran]
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
        nothing=why_nothing_is_low(plans),
        not_finite=not_finite_shares(reference),
        breaks=tuple(each_once(rerun.compiler.record.breaks)),
    )


def _fallbacks(name: str, plan: Plan) -> Iterator[str]:
    if plan.otherwise is not None:
        yield f"{name}: {plan.otherwise}{'' if plan.facts else '; not looked into'}"
    for inside, body in plan.bodies.items():
        yield from _fallbacks(f"{name}, {inside}", body)


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
        inherited = max((self._error(place, o) for o in node.all_input_nodes), default=0.0)
        plan = self.rerun.plan_at(place)
        facts: NodeFacts = plan.facts[place.name]
        return NodeNumerics(
            node=place.name,
            label=facts.label,
            operator=short_op(facts.op),
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
            added=max(0.0, forward.error - inherited) if math.isfinite(inherited) else 0.0,
        )

    def _error(self, place: Place, node: fx.Node) -> float:
        """The error of a value that a node reads, casts looked through."""
        at = place.at(node)
        if at in self.forward:
            error = self.forward[at][2].error
            return 0.0 if math.isnan(error) else error
        sources = node.all_input_nodes
        return self._error(place, sources[0]) if len(sources) == 1 else 0.0


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 0


def outcome_errors(reference: Outcome, mixed: Outcome) -> tuple[float, float, float]:
    """Relative errors of outputs, loss and gradients."""
    names = [n for n in reference.gradients if n in mixed.gradients]
    losses = [[o.loss] if o.loss is not None else [] for o in (reference, mixed)]
    return (
        relative_error(list(reference.outputs), list(mixed.outputs)),
        relative_error(losses[0], losses[1]),
        relative_error(
            [reference.gradients[n] for n in names], [mixed.gradients[n] for n in names]
        ),
    )


def not_finite_shares(reference: Outcome) -> dict[str, float]:
    """How much of what a float32 run gave is not finite, if anything is."""
    gradients = list(reference.gradients.values())
    losses = [reference.loss] if reference.loss is not None else []
    results = {"outputs": list(reference.outputs), "loss": losses, "gradients": gradients}
    shares = {what: not_finite(tensors) for what, tensors in results.items()}
    return {what: share for what, share in shares.items() if share}


def check_reference(reference: Outcome, number: int) -> None:
    """Refuse a float32 run that nothing can be compared with."""
    if not any(t.numel() for t in (*reference.outputs, *reference.gradients.values())):
        raise AmpGraphError(
            "the model returns no floating-point tensor and has no gradients, so that no error "
            "can be bounded"
        )
    shares = not_finite_shares(reference)
    if "gradients" in shares or shares.get("outputs") == 1:
        found = ", ".join(f"{share:.1%} of {what}" for what, share in shares.items())
        raise AmpGraphError(
            f"float32 itself is not finite, in {found} of batch {number}, so that no precision "
            f"meets a bound; find_nonfinite says where that begins"
        )
