"""An annotated graph: every node of an emitted graph with what was decided for it, and why.

    x               input      keep   float32
    x_bfloat16      cast              bfloat16  for fc, on the allow list (matmul)
    fc              operator   allow  bfloat16  listed: matmul
    fc_float32      cast              float32   for softmax, on the deny list (softmax)
    softmax         operator   deny   float32   listed: softmax

This is what all views (text, JSON, DOT, HTML, the report) show; they decide nothing. Each node of
the emitted graph is there exactly once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from amp_graph.dtypes import LOW, dtype_name
from amp_graph.graphs.aten import (
    CAST,
    captured_of,
    get_attribute,
    is_operator,
    op_name,
    tensors_of,
)
from amp_graph.graphs.grad_modes import is_switch
from amp_graph.inspection.flops import FlopCounts
from amp_graph.inspection.spelling import byte_count, input_kind, module_of, shapes, short_op
from amp_graph.ir import Cast, NodeFacts, Plan
from amp_graph.oplists import OpLists
from amp_graph.passes.annotate import tensor_facts
from amp_graph.reasons import Chains, Reason, short_reason, unlisted


@dataclass(frozen=True)
class AnnotatedNode:
    """A node of a graph that runs.

    kind: input, parameter, buffer, constant, graph, operator, cast or output.
    color: the colour it was painted; "" for a cast.
    math: the precision it computes in. `storage`: the dtype of its result.
    low: whether it computes in low precision, or on tensors of it, or stores its result so.
    is_float: whether it is an operator on float32 tensors.
    operands, readers: nodes of the same graph, casts included.
    value: for a cast, the captured node whose value it converts.
    copy_of: for a cast of a weight, the earlier cast that makes the copy which both are.
    bytes: for an operator, the memory of its own that its results take; for a cast, what it reads
        and writes.
    traffic: how many bytes fewer an operator would read and write in low precision.
    """

    name: str
    label: str
    op: str
    kind: str
    color: str = ""
    math: str = ""
    storage: str = ""
    shape: str = ""
    module: str = ""
    source: str = ""
    code: str = ""
    rule: str = ""
    because: str = ""
    why: str = ""
    chain: tuple[Reason, ...] = ()
    operands: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()
    numbers: tuple[float, ...] = ()
    value: str = ""
    copy_of: str = ""
    low: bool = False
    is_float: bool = False
    bytes: int = 0
    traffic: int = 0
    flops: int = 0

    @property
    def is_cast(self) -> bool:
        """Whether it converts, unlike what clamps in front of a saturating cast."""
        return self.kind == "cast" and self.op == short_op(str(CAST))

    @property
    def makes_copy(self) -> bool:
        """Whether it is a cast, and not one for which another one's copy serves."""
        return self.is_cast and not self.copy_of


@dataclass(frozen=True)
class AnnotatedGraph:
    """A graph as it runs. `bodies` has the graphs inside its higher-order operators, by name."""

    name: str
    dtype: str
    nodes: tuple[AnnotatedNode, ...] = ()
    bodies: Mapping[str, AnnotatedGraph] = field(default_factory=dict)
    fallback: str | None = None
    unlisted: tuple[str, ...] = ()
    uncompiled: str | None = None

    def everything(self) -> list[AnnotatedGraph]:
        """Return this graph and all graphs inside it."""
        inner = [g for body in self.bodies.values() for g in body.everything()]
        return [self, *inner]


def annotated_graph(
    name: str, plan: Plan, module: fx.GraphModule | None, lists: OpLists, flops: FlopCounts
) -> AnnotatedGraph:
    """A plan and the graph that was emitted by it, or the captured one and a plan that
    decides nothing. Without a graph only `fallback` is known."""
    if module is None or not plan.facts:
        return AnnotatedGraph(name, dtype_name(plan.dtype), fallback=plan.otherwise)
    writer = _Writer(plan, module, lists, flops)
    bodies = {
        n: annotated_graph(f"{name}.{n}", body, _body(module, n), lists, flops)
        for n, body in plan.bodies.items()
    }
    nodes = tuple(writer.node(n) for n in module.graph.nodes)
    dtype = dtype_name(plan.dtype)
    why_not = plan.otherwise, tuple(map(short_op, unlisted(plan))), plan.uncompiled
    return AnnotatedGraph(name, dtype, nodes, bodies, *why_not)


def _body(module: fx.GraphModule, name: str) -> fx.GraphModule | None:
    body = get_attribute(module, name)
    return body if isinstance(body, fx.GraphModule) else None


class _Writer:
    """Writes the annotated nodes of one graph."""

    def __init__(self, plan: Plan, module: fx.GraphModule, lists: OpLists, flops: FlopCounts):
        self.plan, self.flops = plan, flops
        self.labels = {name: facts.label for name, facts in plan.facts.items()}
        operators = filter(is_operator, module.graph.nodes)
        found = ((n.name, lists.lookup(n.target)) for n in operators)
        listings = {name: listing for name, listing in found if listing is not None}
        self.chains = Chains(plan, listings, self.labels)
        self.casts: dict[tuple[str, torch.dtype], list[Cast]] = defaultdict(list)
        for cast in plan.casts:
            self.casts[cast.value, cast.dtype].append(cast)
        self.copies: dict[Cast, str] = {}  # of weights, by what was written first

    def node(self, node: fx.Node) -> AnnotatedNode:
        if is_switch(node, self.plan.facts):
            return self._switch(node)
        facts = self.plan.facts.get(node.name)
        return self._cast(node) if facts is None else self._captured(node, facts)

    def _switch(self, node: fx.Node) -> AnnotatedNode:
        """Annotate a node that turns gradient recording on for a cast, or off again after it."""
        why = "has the cast recorded that is first needed where nothing is"
        op, why_here = short_op(op_name(node)), (Reason(node.name, why),)
        return AnnotatedNode(
            node.name, node.name, op, "operator", color="keep", why=why, chain=why_here
        )

    def _captured(self, node: fx.Node, facts: NodeFacts) -> AnnotatedNode:
        plan, name = self.plan, node.name
        paint = plan.paints.get(name)
        tensors = tuple(tensor_facts(t) for t in tensors_of(node))
        floats = [t for t in tensors if t.dtype.is_floating_point]
        kind = _kind(facts)
        computes = kind == "operator" and not facts.is_view and facts.op != "getitem"
        own = sum(t.numel * t.dtype.itemsize for t in floats) if computes else 0
        operands = sum(plan.facts[r].numel for r in facts.reads) if computes else 0
        return AnnotatedNode(
            name=name,
            label=self.labels[name],
            op=short_op(facts.op),
            kind=kind,
            color=paint.color.value if paint else "",
            math=self._math(node, facts),
            storage=dtype_name(tensors[0].dtype) if tensors and facts.op != "output" else "",
            shape=shapes(facts.tensors) if facts.op != "output" else "",
            module=module_of(facts),
            source=facts.source,
            code=facts.code,
            rule=paint.rule if paint else "",
            because=paint.because if paint else "",
            why=short_reason(plan, name),
            chain=self.chains.of(name),
            operands=_names(node.all_input_nodes),
            readers=_names(node.users),
            numbers=facts.scalars,
            low=name in plan.low or any(t.dtype in LOW for t in floats),
            is_float=facts.has_precision,
            bytes=own,
            traffic=2 * (facts.numel + operands) if computes else 0,
            flops=self.flops.of(node),
        )

    def _math(self, node: fx.Node, facts: NodeFacts) -> str:
        if _kind(facts) != "operator" or facts.op == "getitem":
            return ""
        if facts.name in self.plan.low and facts.storage is None:
            return dtype_name(self.plan.dtype)
        if facts.fixed:  # an autocast region of the model's own, say, or float64 work
            floats = [t.dtype for n in (node, *node.all_input_nodes) for t in tensors_of(n)]
            return next((dtype_name(d) for d in floats if d.is_floating_point), "")
        return "float32" if facts.reads else ""

    def _cast(self, node: fx.Node) -> AnnotatedNode:
        """A cast, or what clamps in front of a saturating one."""
        value = captured_of(node, self.plan.facts)
        facts, source = self.plan.facts[value.name], node.all_input_nodes[0]
        to, came = _dtype(node), _dtype(source)
        cast = self._planned(value.name, node)
        size = sum(t.numel for t in map(tensor_facts, tensors_of(node)))
        is_cast, copy_of = node.target is CAST, ""
        if is_cast and cast is not None and cast.is_weight:
            made = self.copies.setdefault(cast, node.name)
            copy_of = made if made != node.name else ""
        return AnnotatedNode(
            name=node.name,
            label=self.labels[value.name] + node.name.removeprefix(value.name),
            op=short_op(op_name(node)),
            kind="cast",
            storage=dtype_name(to),
            shape=shapes(facts.tensors),
            module=module_of(facts),
            source=facts.source,
            code=facts.code,
            why=self._why_cast(value.name, cast, is_cast),
            chain=self._cast_chain(value.name, cast),
            operands=_names(node.all_input_nodes),
            readers=_names(node.users),
            value=value.name,
            copy_of=copy_of,
            bytes=size * (came.itemsize + to.itemsize) if is_cast and not copy_of else 0,
        )

    def _planned(self, value: str, node: fx.Node) -> Cast | None:
        """Return the planned cast that a node of the graph is, or is the clamp of. `value`: its
        operand."""
        made = node
        while made.target is not CAST:
            made = next(iter(made.users))
        casts, readers = self.casts[value, _dtype(made)], set(_names(made.users))
        for_readers = (c for c in casts if readers.intersection(c.readers))
        return next(for_readers, next(iter(casts), None))

    def _why_cast(self, value: str, cast: Cast | None, is_cast: bool) -> str:
        if not is_cast:
            return "keeps finite numbers finite in the cast that follows"
        readers = cast.readers if cast else ()
        spelled = [self.labels[r] for r in readers[:2]]
        more = f" and {len(readers) - 2} more" if len(readers) > 2 else ""
        return f"{self.labels[value]} for {', '.join(spelled)}{more}"

    def _cast_chain(self, value: str, cast: Cast | None) -> tuple[Reason, ...]:
        own = Reason(value, f"{self.labels[value]} is {self.plan.precision(value)}")
        alike: dict[tuple[str, str], list[str]] = defaultdict(list)
        for reader in cast.readers if cast else ():
            alike[self.plan.precision(reader), short_reason(self.plan, reader)].append(reader)
        steps = [own]
        for (precision, why), (first, *others) in alike.items():
            label = self.labels[first]
            who = f"{label} and {len(others)} more take" if others else f"{label} takes"
            steps.append(Reason(first, f"{who} {precision}" + (f" ({why})" if why else "")))
        if cast is not None:
            steps.append(Reason(value, f"one cast for all its readers: {byte_count(cast.bytes)}"))
        return tuple(steps)


def _kind(facts: NodeFacts) -> str:
    if facts.op == "placeholder":
        return input_kind(facts)
    if facts.op == "get_attr":
        return "constant" if facts.tensors else "graph"
    return "output" if facts.op == "output" else "operator"


def _names(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(n.name for n in nodes)


def _dtype(node: fx.Node) -> torch.dtype:
    return tensors_of(node)[0].dtype
