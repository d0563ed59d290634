"""Trials: what would be decided for the graphs of a model if one thing were otherwise.

    now                                     without Override("deny", op="gelu")
    linear allow, gelu deny, linear_1 allow     gelu infer, low: 1 operator more, 2 casts less

A trial paints and places casts anew, on what is known of the captured graphs. It neither needs them
nor runs them: what only a replay shows, a kernel that refuses a precision after all, it cannot say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import networkx as nx
import torch

from amp_graph.backend.rewrite import painted
from amp_graph.flow import flow_graph
from amp_graph.inspection.annotated import AnnotatedGraph
from amp_graph.inspection.source import AnnotatedModel
from amp_graph.ir import NodeFacts, Plan
from amp_graph.oplists import OpLists
from amp_graph.passes.place_casts import cast_bytes, place_casts
from amp_graph.plans.pins import Pins, pins_for
from amp_graph.policy import Policy
from amp_graph.rules import Rule
from amp_graph.sums import Summable

Facts = Mapping[str, NodeFacts]
Edit = Callable[[NodeFacts], NodeFacts]


@dataclass(frozen=True)
class Grounds:
    """The grounds of decisions. `edit` changes the facts of a node, as other code of the model
    would."""

    policy: Policy
    lists: OpLists
    in_other_dtype: bool = False
    edit: Edit | None = None


@dataclass(frozen=True)
class Gain(Summable):
    """The gain of a change: operators that become low, less those that no longer are; the bytes
    that they read and write less, and their FLOPs. `cast_bytes`: how many more casts move."""

    nodes: int = 0
    bytes: int = 0
    flops: int = 0
    cast_bytes: int = 0


class Trials:
    """The trials of changes to one model. `painted`: how many nodes have been painted anew."""

    def __init__(self, model: AnnotatedModel):
        self.now = Grounds(model.policy, model.lists)
        self.painted = 0
        self._parts: list[_Part] = []
        for graph, plan in zip(model.after, model.plans, strict=False):
            pins = pins_for(model.saved, plan) if model.saved and plan.facts else None
            self._parts += _parts(graph, plan, pins)

    @property
    def graphs(self) -> list[AnnotatedGraph]:
        """The graphs that run as decided, bodies included."""
        return [part.graph for part in self._parts if part.is_converted]

    def gain(self, then: Grounds) -> Gain:
        """Return the gain of all graphs that run as decided."""
        return self._sum((p for p in self._parts if p.is_converted), then)

    def gain_of(self, graph: AnnotatedGraph) -> Gain:
        """Return the gain of a graph that does not run as decided, if it did."""
        return self._sum((p for p in self._parts if p.graph is graph), self.now)

    def _sum(self, parts: Iterable[_Part], then: Grounds) -> Gain:
        found = Gain()
        for part in parts:
            facts = part.facts_then(self.now, then)
            if part.is_converted and not part.is_affected(facts, self.now, then):
                continue
            self.painted += len(facts)
            found += part.gain(facts, then)
        return found


def _parts(graph: AnnotatedGraph, plan: Plan, pins: Pins | None) -> Iterator[_Part]:
    """A graph and those inside it, unless it runs as captured, and they with it."""
    yield _Part(graph, plan, pins)
    if plan.fallback is None:
        for name, body in plan.bodies.items():
            if name in graph.bodies:
                yield from _parts(graph.bodies[name], body, pins and pins.bodies.get(name))


@dataclass(frozen=True)
class _Part:
    """A graph or a body, and the plan for it."""

    graph: AnnotatedGraph
    plan: Plan
    pins: Pins | None

    @property
    def is_converted(self) -> bool:
        return self.plan.fallback is None

    @cached_property
    def flow(self) -> nx.DiGraph:
        return flow_graph(self.plan.facts)

    @cached_property
    def cast_bytes(self) -> int:
        return cast_bytes(self.plan.facts, self.flow, self.plan.paints, self.plan.low)

    def facts_then(self, now: Grounds, then: Grounds) -> Facts:
        """Return the facts of the nodes under other lists, in another precision, or with other
        code."""
        facts = self.plan.facts
        if then.lists is not now.lists:
            facts = {n: _listed(f, now.lists, then.lists) for n, f in facts.items()}
        if then.in_other_dtype:
            dtype = _other(self.plan.dtype)
            facts = {n: _stored(f, then.lists, dtype) for n, f in facts.items()}
        if then.edit is not None:
            facts = {n: then.edit(f) for n, f in facts.items()}
        return facts

    def is_affected(self, facts: Facts, now: Grounds, then: Grounds) -> bool:
        """Whether anything can be decided otherwise."""
        was = self.plan.facts
        if then.in_other_dtype or (facts is not was and facts != was):
            return True
        if then.policy is now.policy:
            return False
        both = (now.policy, then.policy)
        return any(a != b for a, b in ([p.override_for(f) for p in both] for f in was.values()))

    def gain(self, facts: Facts, then: Grounds) -> Gain:
        low, cast_bytes = self._decided(facts, then)
        found = Gain(cast_bytes=cast_bytes - (self.cast_bytes if self.is_converted else 0))
        for node in self.graph.nodes:
            name = node.name
            sign = (name in low) - (name in self.plan.low)
            if sign and node.is_float and not self._is_removed(name, facts):
                found += Gain(sign, sign * node.traffic, sign * node.flops)
        return found

    def _is_removed(self, name: str, facts: Facts) -> bool:
        """Whether it is a conversion that other code would not have."""
        return self.plan.facts[name].user_cast and not facts[name].user_cast

    def _decided(self, facts: Facts, then: Grounds) -> tuple[frozenset[str], int]:
        """The nodes that would be low, and the bytes that casts would move."""
        plan, policy, flow = self.plan, then.policy, self.flow
        dtype = _other(plan.dtype) if then.in_other_dtype else plan.dtype
        refused = [n for n, p in plan.paints.items() if p.rule == Rule.NO_KERNEL]
        seen = () if then.in_other_dtype else refused
        _, paints = painted(facts, flow, then.lists, policy, dtype, self.pins, seen)
        low = place_casts(facts, flow, paints)
        return low, cast_bytes(facts, flow, paints, low)


def _listed(f: NodeFacts, was: OpLists, now: OpLists) -> NodeFacts:
    """Return a node's facts under other lists, which differ in colour, group and bounds alone."""
    listing = now.lookup(f.op)
    if listing is None or listing == was.lookup(f.op):
        return f
    return replace(f, color=listing.color, group=listing.group, bounded=listing.bounded)


def _stored(f: NodeFacts, lists: OpLists, dtype: torch.dtype) -> NodeFacts:
    listing = lists.lookup(f.op)
    device = f.tensors[0].device if f.tensors else "cpu"
    return replace(f, storage=listing.storage_on(device, dtype)) if listing else f


def _other(dtype: torch.dtype) -> torch.dtype:
    return torch.float16 if dtype is torch.bfloat16 else torch.bfloat16
