"""Lift weights: take the casts of parameters out of the graph, which gets their results as inputs.

    x_low = _to_copy(x, dtype=bfloat16)         x_low = _to_copy(x, dtype=bfloat16)
    w_low = _to_copy(w, dtype=bfloat16)         mm    = mm(x_low, w_bfloat16)
    mm    = mm(x_low, w_low)
    inputs: x, w                                inputs: x, w, w_bfloat16

All low-precision weights can then be made in one fused call, and their gradients widened in one.
Several casts of one weight are an input each, for their gradients, and one copy.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from amp_graph.graphs.aten import CAST
from amp_graph.graphs.grad_modes import is_switch
from amp_graph.ir import Cast, Plan


def lift_weights(
    emitted: fx.GraphModule, plan: Plan
) -> tuple[fx.GraphModule, tuple[tuple[int, torch.dtype], ...]]:
    """Return the graph with one more input for each cast of a parameter; and for each of those
    inputs, in order, the position of its parameter among the graph's inputs, and its dtype.

    `emitted` is left as it was. A parameter that the graph writes to keeps its casts.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs = {n: i for i, n in enumerate(emitted.graph.find_nodes(op="placeholder"))}
    for node in inputs:
        copies[node] = graph.node_copy(node)
    weights: list[tuple[int, torch.dtype]] = []
    dropped: set[fx.Node] = set()
    casts = [n for n in emitted.graph.nodes if n.target is CAST and n.name not in plan.facts]
    for cast in casts:
        source = cast.all_input_nodes[0]
        if source in copies and plan.facts[source.name].is_weight:
            copies[cast] = graph.placeholder(cast.name)
            copies[cast].meta = {**cast.meta, "is_parameter": False, "weight_of": source.name}
            weights.append((inputs[source], cast.meta["val"].dtype))
            dropped.update(n for n in (cast.prev, cast.next) if is_switch(n, plan.facts))
    for node in emitted.graph.nodes:
        if node not in copies and node not in dropped:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(emitted, graph, class_name="AmpGraph"), tuple(weights)


def with_lifted(plan: Plan) -> Plan:
    """Return the plan once weights are lifted: all casts of one weight are one, for all their
    readers."""
    casts: dict[object, Cast] = {}
    for number, cast in enumerate(plan.casts):
        copy = (cast.value, cast.dtype) if cast.is_weight else number
        before = casts.get(copy)
        readers = cast.readers if before is None else (*before.readers, *cast.readers)
        casts[copy] = replace(cast, readers=readers)
    return replace(plan, casts=(*casts.values(),))
