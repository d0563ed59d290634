"""The flow graph: which node computes on which node's float32 values, and what flows in it."""

from __future__ import annotations

import math
from collections.abc import Mapping

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
