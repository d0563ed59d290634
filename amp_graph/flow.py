"""The flow graph: which node computes on which node's float32 values, and what flows in it."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping

import networkx as nx
import torch

from amp_graph.ir import Color, NodeFacts


def flow_graph(facts: Mapping[str, NodeFacts]) -> nx.DiGraph:
    """A directed graph over node names, an edge from each value to each of its readers.

    Nodes stand in graph order, which is a topological order.
    """
    flow = nx.DiGraph()
    flow.add_nodes_from(facts)
    flow.add_edges_from((value, f.name) for f in facts.values() for value in f.reads)
    return flow


def returned(facts: Mapping[str, NodeFacts]) -> list[str]:
    """The nodes whose float32 values the graph returns."""
    return [name for f in facts.values() if f.op == "output" for name in f.reads]


def huge_values(
    facts: Mapping[str, NodeFacts],
    colors: Mapping[str, Color | None],
    dtype: torch.dtype,
) -> set[str]:
    """What carries a finite constant beyond the low precision's range, until something bounds
    it."""
    limit = torch.finfo(dtype).max
    huge: set[str] = set()
    for name, f in facts.items():
        carries = any(p in huge for p in f.reads) if huge else False
        if f.scalars:
            carries = carries or any(math.isfinite(x) and abs(x) > limit for x in f.scalars)
        if carries and not f.bounded and colors[name] is not Color.ALLOW:
            huge.add(name)
    return huge


# What a value carries, as bits. A 0-dimensional one carries nothing: it takes no part in promotion.
WIDE, LOW, WEIGHT = 1, 2, 4


def wide_values(
    facts: Mapping[str, NodeFacts],
    colors: Mapping[str, Color | None],
    narrowed: Container[str],
    narrows_streams: bool,
) -> tuple[set[str], dict[str, str | None]]:
    """The nodes whose values still hold full float32; and the infer nodes that may not be low, each
    with the wide operand that promotes it, or None if nothing low reaches it at all.

    Inputs, weights, float32 results and what is computed from them are wide; beside something low
    no longer, if streams are narrowed. A 0-dimensional tensor takes no part in promotion, nor does
    a weight of a `narrowed` node, whose kernel computes in float32 anyway.
    """
    wide: set[str] = set()
    not_low: dict[str, str | None] = {}
    carried: dict[str, int] = {}
    for name, f in facts.items():
        reads_weights = name not in narrowed
        reached, wide_operand = False, None
        for operand in f.reads:
            bits = carried[operand]
            if reads_weights or not bits & WEIGHT:
                reached = reached or bool(bits & LOW)
                wide_operand = wide_operand or (operand if bits & WIDE else None)
        if reached and narrows_streams:
            wide_operand = None
        color = colors[name]
        if color is Color.INFER and (wide_operand or not reached):
            not_low[name] = wide_operand if reached else None
            color = Color.DENY
        bits = WEIGHT if f.is_parameter else 0
        if color is Color.ALLOW or (reached and color in (Color.INFER, Color.CLEAR)):
            bits |= LOW
        if color is not Color.ALLOW and (wide_operand or not reached):
            bits |= WIDE
            wide.add(name)
        carried[name] = 0 if f.is_scalar else bits
    return wide, not_low
