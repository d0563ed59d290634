"""The greedy fill of TensorFlow's grappler on our painted colours, to set our plans beside.

It is held to what binds us too: values that go together have one precision, and no float32
reader gets a value rounded that was whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from unittest import mock

import networkx as nx
from cuda_autocast import Casts, autocast_casts, our_casts
from torch import fx, nn

import amp_graph
from amp_graph.flow import flow_graph
from amp_graph.ir import Color, NodeFacts, Paint, Plan
from amp_graph.passes.place_casts import casts_for, place_casts, traffic
from amp_graph.rewrite import rewrite

FREE = (Color.INFER, Color.CLEAR)
Facts = Mapping[str, NodeFacts]
Paints = Mapping[str, Paint]


@dataclass
class Comparison:
    """All graphs of one model: casts of our plans and of autocast, and bytes moved by our choice
    of low nodes and by a greedy fill. `refused` names operators that were chosen and then could
    not run in low precision; the greedy fill does without them too."""

    ours: Casts = field(default_factory=Casts)
    autocast: Casts = field(default_factory=Casts)
    moved: int = 0
    greedy_cast_bytes: int = 0
    greedy_moved: int = 0
    refused: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()


def compare(model: nn.Module, args: tuple, kwargs: dict, policy: str = "bfloat16") -> Comparison:
    found = Comparison()
    for captured, plan in captured_plans(model, args, kwargs, policy):
        found.ours += our_casts(plan)
        found.autocast += autocast_casts(captured, plan.dtype)
        for part in with_bodies(plan):
            chosen, _ = place_casts(part.facts, flow_graph(part.facts), part.paints, part.dtype)
            refused = chosen - part.low
            casts, moved = bytes_moved(part, greedy_fill(part.facts, part.paints) - refused)
            found.moved += bytes_moved(part, part.low)[1]
            found.greedy_cast_bytes += casts
            found.greedy_moved += moved
            found.refused += tuple(part.facts[name].op for name in sorted(refused))
            found.fallbacks += (part.fallback,) if part.fallback else ()
    return found


def with_bodies(plan: Plan) -> Iterator[Plan]:
    yield plan
    for body in plan.bodies.values():
        yield from with_bodies(body)


def captured_plans(
    model: nn.Module, args: tuple, kwargs: dict, policy: str
) -> list[tuple[fx.GraphModule, Plan]]:
    """Convert a model, run it once, and return its captured graphs with their plans."""
    seen = []

    def recording(captured, *rest):
        emitted, plan = rewrite(captured, *rest)
        seen.append((captured, plan))
        return emitted, plan

    with mock.patch("amp_graph.compiler.rewrite", recording):
        amp_graph.convert(model, policy=policy)(*args, **kwargs)
    return seen


def bytes_moved(plan: Plan, low: frozenset[str]) -> tuple[int, int]:
    """Bytes of the casts that a choice of low nodes needs, and of these together with what the
    free nodes left in float32 move more than in low precision; without the bodies."""
    casts = casts_for(plan.facts, flow_graph(plan.facts), plan.paints, low, plan.dtype)
    cast_bytes = sum(c.bytes for c in casts)
    free = [n for n, p in plan.paints.items() if p.color in FREE and n not in low]
    return cast_bytes, cast_bytes + sum(traffic(plan.facts[n], plan.facts) for n in free)


def greedy_fill(facts: Facts, paints: Paints) -> frozenset[str]:
    """Free nodes between two allow nodes turn low, then clear nodes beside a low one, until
    nothing changes; what would break a constraint goes back to float32."""
    flow = flow_graph(facts)
    low = {n for n, p in paints.items() if p.color is Color.ALLOW}
    above, below = set(low), set(low)
    for n in facts:
        if paints[n].color in FREE and above.intersection(flow.predecessors(n)):
            above.add(n)
    for n in reversed(list(facts)):
        if paints[n].color in FREE and below.intersection(flow.successors(n)):
            below.add(n)
    low |= above & below
    edge = list(low)
    while edge:
        name = edge.pop()
        for other in (*flow.predecessors(name), *flow.successors(name)):
            if other not in low and paints[other].color is Color.CLEAR:
                low.add(other)
                edge.append(other)
    return frozenset(_repaired(low, facts, paints, flow))


def _repaired(low: set[str], facts: Facts, paints: Paints, flow: nx.DiGraph) -> set[str]:
    groups = list(_groups(facts, paints))
    changed = True
    while changed:
        changed = False
        for group in groups:
            inside = {n for n in group if n in low}
            if inside and (inside != group or any(_rounds(n, low, paints, flow) for n in group)):
                free = {n for n in inside if paints[n].color in FREE}
                low -= free
                changed |= bool(free)
    return low


def _groups(facts: Facts, paints: Paints) -> Iterator[set[str]]:
    """A tuple with its parts, and all that lives in one piece of written memory."""
    together = nx.Graph()
    together.add_nodes_from(n for n in facts if paints[n].color in FREE)
    for name, f in facts.items():
        if paints[name].color in FREE and f.op == "getitem":
            together.add_edges_from((name, parent) for parent in f.reads)
        elif paints[name].color in FREE and f.written:
            together.add_edge(name, f.memory)
    yield from (set(group) for group in nx.connected_components(together))


def _rounds(name: str, low: set[str], paints: Paints, flow: nx.DiGraph) -> bool:
    """Whether a float32 reader would get a value rounded that still held full float32."""
    return (
        paints[name].wide
        and paints[name].color in FREE
        and any(r not in low for r in flow.successors(name))
    )
