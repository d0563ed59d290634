"""Lift results: leave casts of results to the boundary, and return their low operands.

    logits = mm(x_low, w_low)                   logits = mm(x_low, w_low)
    wide   = _to_copy(logits, dtype=float32)    return [logits], which is to become float32
    return [wide]

The boundary widens such a result where it hands it out. A gradient that comes in for it (of logits,
the largest there is) is then multiplied by the loss scale and narrowed in one call, which neither
writes nor keeps the product in float32.
"""

from __future__ import annotations

from torch import fx

from amp_graph.graphs.aten import results_of
from amp_graph.graphs.grad_modes import last_casts


def lift_results(module: fx.GraphModule) -> tuple[fx.GraphModule, frozenset[int]]:
    """Return the graph without casts to float32 that are only returned, and the positions of the
    results that are to become float32 instead. Return the module itself if there are none."""
    casts = {*last_casts(module)}
    positions = frozenset(i for i, result in enumerate(results_of(module)) if result in casts)
    if not positions:
        return module, positions
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node in casts:
            copies[node] = copies[node.args[0]]
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(module, graph, class_name=type(module).__name__), positions
