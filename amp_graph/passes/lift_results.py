"""Lift results: take the casts of what a graph returns out of it, which returns their operands.

    logits = mm(x_low, w_low)                   logits = mm(x_low, w_low)
    wide   = _to_copy(logits, dtype=float32)    return [logits], which is to become float32
    return [wide]

The boundary widens them where it hands them out. A gradient that comes in for one of them, the
largest there is if they are logits, is then multiplied by the loss scale and narrowed in one call,
which neither writes nor keeps the product in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from amp_graph.graphs.aten import results_of, widens_low, written_operands
from amp_graph.graphs.grad_modes import grad_modes


def lift_results(module: fx.GraphModule) -> tuple[fx.GraphModule, frozenset[int]]:
    """Return the graph without casts of low precision to float32 that are only returned, and the
    positions of what is to become float32 instead. The module itself if there are none."""
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


def last_casts(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Those after which nothing is written to, which they might have read before, and which are
    recorded if what comes after the graph is."""
    if grad_modes(module.graph):
        return
    results = results_of(module)
    for node in reversed(module.graph.nodes):
        if any(True for _ in written_operands(module, node)):
            return
        if node in results and len(node.users) == 1 and widens_low(node):
            yield node
