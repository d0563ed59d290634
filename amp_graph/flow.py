"""The flow graph: which node computes on which node's float32 values."""

from __future__ import annotations

from collections.abc import Mapping

import networkx as nx

from amp_graph.ir import NodeFacts


def flow_graph(facts: Mapping[str, NodeFacts]) -> nx.DiGraph:
    """A directed graph over node names, an edge from each value to each of its readers.

    Nodes stand in graph order, which is a topological order.
    """
    flow = nx.DiGraph()
    flow.add_nodes_from(facts)
    flow.add_edges_from((value, f.name) for f in facts.values() for value in f.reads)
    return flow
