"""Find the first value or gradient that is not finite.

A node is where it begins if its value has an infinity or a NaN that none of its operands has, and
that is not a number of its own (a mask value of -inf). Infinities that the float32 run has at the
same node are the model's intent, unless nothing else explains the outcome; a NaN, an infinite
gradient or an infinite parameter never is. What explains a loss that is not finite are infinities
that lead to an output, rather than the gradients that the loss then gives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from amp_graph.batches import Batch
from amp_graph.dtypes import dtype_name
from amp_graph.graphs.aten import captured_of
from amp_graph.inspection.spelling import short_op
from amp_graph.inspection.terminal import Shown
from amp_graph.numerics.outputs import check_loss
from amp_graph.numerics.rerun import Loss, Outcome, Rerun, rerun_of
from amp_graph.numerics.watched_graph import Observer, Place
from amp_graph.plans.plan_file import PlanSource
from amp_graph.policy import PolicySource
from amp_graph.watched import MINUS, NAN, PLUS, Gradients, kinds, own_numbers

OUTSIDE = "code outside of the graphs"


@dataclass(frozen=True, repr=False)
class NonFinite(Shown):
    """The first value or gradient that is not finite, in the order of execution.

    phase: "forward" or "backward".
    node: who computed it; in backward, the operator whose derivative gave the gradient.
    value: whose value or gradient it is; an operator, cast, input or parameter.
    kind: NaN, inf or -inf. dtype: that of the value.
    graph: the index of its plan; None for code outside of the graphs, which is not looked into.
    in_float32: the float32 run has it at the same place, so precision is not the cause.
    """

    phase: str
    node: str
    operator: str
    value: str
    kind: str
    dtype: str
    module: str
    source: str
    code: str
    graph: int | None
    in_float32: bool

    def __str__(self) -> str:
        what = "value" if self.phase == "forward" else f"gradient of {self.value}"
        where = f" in {self.module}" if self.module else ""
        line = f" at {self.source}" if self.source else ""
        lines = [
            f"first {self.kind} in {self.phase}: {what} from {self.node} ({self.operator}), "
            f"{self.dtype}{where}{line}"
        ]
        lines += [f"    {self.code}"] if self.code else []
        lines += ["    float32 has it too: precision is not the cause"] if self.in_float32 else []
        return "\n".join(lines)


def find_nonfinite(
    model: nn.Module,
    batch: Batch,
    *,
    loss: Loss | None = None,
    loss_scale: float = 1.0,
    policy: PolicySource = None,
    plan: PlanSource | None = None,
) -> NonFinite | None:
    """Run `model` once in mixed precision, forward and backward, and name where the first value
    that is not finite comes from; the first that float32 does not have, or else the first of all.
    None if outputs, loss and gradients are all finite.

    `loss` makes a scalar of the model's output; without it the output's own loss is used, or the
    mean square of the outputs. Backward starts from `loss_scale` times it. The model, its
    gradients and the random state stay as they were; a model that is not converted is looked at
    as `convert(model, policy=policy, plan=plan)` would run it.
    """
    check_loss(loss, loss_scale)
    rerun = rerun_of(model, policy, plan)
    mixed = _Flags()
    outcome = rerun.run(batch, loss, mixed, mixed=True, loss_scale=loss_scale)
    unseen = next(_not_finite(outcome), None)
    if unseen is None:
        return None
    plain = _Flags()
    in_float32 = rerun.run(batch, loss, plain, mixed=False, loss_scale=loss_scale)
    if not mixed.found:
        return replace(unseen, in_float32=any(_not_finite(in_float32)))
    for finding in mixed.found:
        faults = (k for k in finding.kinds if k == NAN or finding.is_never_meant)
        kind = next((k for k in finding.kinds if not plain.has(finding, k)), next(faults, None))
        if kind is None:
            continue
        is_in_float32 = plain.has(finding, kind)
        if finding.phase == "backward" and is_in_float32 and mixed.led and kinds(outcome.loss):
            finding, kind = mixed.led[0], mixed.led[0].kinds[0]
        return _told(rerun, finding, kind, is_in_float32)
    return _told(rerun, mixed.found[0], mixed.found[0].kinds[0], True)


@dataclass(frozen=True)
class _Finding:
    """A place where kinds of non-finite numbers appear that were not there before: the node whose
    value or gradient it is, and the node that computed it."""

    phase: str
    place: Place
    node: fx.Node
    valued: fx.Node
    kinds: tuple[str, ...]
    dtype: torch.dtype

    @property
    def is_never_meant(self) -> bool:
        """An infinite gradient or parameter; an infinite value may be meant, as in a mask."""
        return self.phase == "backward" or bool(self.node.meta.get("is_parameter"))


@dataclass
class _Flags(Observer):
    """The values and gradients that are not finite, by place; `found`: in order of appearance;
    `origins`: which of these each value comes from; `led`: those that lead to an output."""

    values: dict[Place, frozenset[str]] = field(default_factory=dict)
    gradients: dict[Place, frozenset[str]] = field(default_factory=dict)
    runs: dict[Place, Gradients] = field(default_factory=lambda: defaultdict(Gradients))
    nodes: dict[Place, fx.Node] = field(default_factory=dict)
    found: list[_Finding] = field(default_factory=list)
    origins: dict[Place, tuple[_Finding, ...]] = field(default_factory=dict)
    led: tuple[_Finding, ...] = ()

    def value(self, place: Place, node: fx.Node, value: Any) -> None:
        tensors = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
        floats = [t.detach() for t in tensors if t.is_floating_point()]
        found = kinds(floats)
        self.nodes[place] = node
        self.values[place] = found
        before = [self.values.get(place.at(o), frozenset()) for o in node.all_input_nodes]
        new = found.difference(*before, own_numbers(node))
        operands = (self.origins.get(place.at(o), ()) for o in node.all_input_nodes)
        origins = tuple(dict.fromkeys(finding for each in operands for finding in each))
        if node.op == "output":
            self.led += origins
        elif new:
            finding = _Finding("forward", place, node, node, _in_order(new), floats[0].dtype)
            self.found.append(finding)
            origins += (finding,)
        if found:
            self.origins[place] = origins

    def gradient(self, place: Place, gradient: torch.Tensor) -> None:
        node, run = self.nodes[place], replace(place, name="")
        giver = self.runs[run].giver(node, gradient)
        self.gradients[place] = found = kinds(gradient)
        if found:
            dtype, by = gradient.dtype, giver or node
            self.found.append(_Finding("backward", place, by, node, _in_order(found), dtype))

    def has(self, finding: _Finding, kind: str) -> bool:
        """Whether this run has such numbers at the place of a finding in another."""
        place, node = finding.place, finding.valued
        while place not in self.values and node.all_input_nodes:  # a cast is of this run's value
            node = node.all_input_nodes[0]
            place = place.at(node)
        seen = self.values if finding.phase == "forward" else self.gradients
        return kind in seen.get(place, ())


def _in_order(found: frozenset[str]) -> tuple[str, ...]:
    return tuple(kind for kind in (NAN, PLUS, MINUS) if kind in found)


def _not_finite(outcome: Outcome) -> Iterator[NonFinite]:
    """Yield the results of a run that are not finite, as if code outside of the graphs had made
    them."""
    results = [("forward", OUTSIDE, "an output", tensor) for tensor in outcome.outputs]
    if outcome.loss is not None:
        results.append(("forward", "the loss", "the loss", outcome.loss))
    results += [("backward", OUTSIDE, name, g) for name, g in outcome.gradients.items()]
    for phase, node, value, tensor in results:
        for kind in _in_order(kinds(tensor)):
            dtype = dtype_name(tensor.dtype)
            yield NonFinite(phase, node, "no graph", value, kind, dtype, "", "", "", None, False)


def _told(rerun: Rerun, finding: _Finding, kind: str, in_float32: bool) -> NonFinite:
    plan = rerun.plan_at(finding.place)
    node, name = finding.node, captured_of(finding.node, plan.facts).name
    facts = plan.facts[name]
    is_cast = node.name not in plan.facts
    operator = "cast" if is_cast else short_op(facts.op)
    outside = finding.phase == "backward" and node.name == finding.place.name
    return NonFinite(
        phase=finding.phase,
        node="the loss" if outside else facts.label,
        operator="outside of the graph" if outside else operator,
        value=plan.facts[captured_of(finding.valued, plan.facts).name].label,
        kind=kind,
        dtype=dtype_name(finding.dtype),
        module=facts.module_path,
        source=facts.source,
        code=facts.code,
        graph=finding.place.graph,
        in_float32=in_float32,
    )
