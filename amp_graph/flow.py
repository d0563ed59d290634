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
        if f.bounded or colors[name] is Color.ALLOW:
            continue
        own = any(math.isfinite(x) and abs(x) > limit for x in f.scalars)
        if own or any(p in huge for p in f.reads):
            huge.add(name)
    return huge


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
    low_reaches: set[str] = set()
    not_low: dict[str, str | None] = {}
    scalars = {name for name, f in facts.items() if f.is_scalar}
    scalars_and_weights = scalars | {name for name, f in facts.items() if f.is_parameter}
    for name, f in facts.items():
        apart = scalars_and_weights if name in narrowed else scalars
        operands = [p for p in f.reads if p not in apart]
        reached = any(p in low_reaches for p in operands)
        keeps_wide = not (reached and narrows_streams)
        wide_operand = next((p for p in operands if p in wide), None) if keeps_wide else None
        color = colors[name]
        if color is Color.INFER and (wide_operand or not reached):
            not_low[name] = wide_operand if reached else None
            color = Color.DENY
        if color is Color.ALLOW or (color in (Color.INFER, Color.CLEAR) and reached):
            low_reaches.add(name)
        if color is not Color.ALLOW and (wide_operand or not reached):
            wide.add(name)
    return wide, not_low
