"""Writes that a retraced graph hides: its values do not tell all the memory that they share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from amp_graph.graphs.aten import (
    SET_DATA,
    bodies_of,
    is_retraced,
    last_written,
    storages,
    tensors_of,
)

SET = torch.ops.aten.set_.source_Tensor


def hidden_memory(traced: fx.GraphModule) -> Iterator[str]:
    """Yield a sentence for each write whose target the values in `meta` do not tell: into another
    memory, or into one that was handed on before under a second name."""
    for node in traced.graph.find_nodes(op="call_function", target=SET):
        if node.args[0].op in ("placeholder", "get_attr"):
            yield f"'{node.name}' puts a tensor into other memory (`x.data = y`)"
    for node in traced.graph.find_nodes(op="call_function", target=SET_DATA):
        assigned, inputs = storages(node.args[1]), traced.graph.find_nodes(op="placeholder")
        if any(key in assigned for x in inputs if x is not node.args[0] for key in storages(x)):
            yield f"'{node.name}' puts a tensor into that of another (`x.data = y`)"
    written = last_written(traced)
    for position, node in enumerate(traced.graph.nodes):
        memory = (key for n in (node, *node.all_input_nodes) for key in storages(n))
        if _hands_on(traced, node) and any(written.get(k, -1) >= position for k in memory):
            yield f"'{node.name}' returns memory of an operand, and one or the other is written"


def _hands_on(traced: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a higher-order operator returns memory that its forward body, the first, was given.
    Further outputs of that body are what it saves for backward."""
    forward = next(iter(bodies_of(traced, node).values()), None)
    if forward is None or not is_retraced(forward):
        return False
    output = forward.graph.output_node()
    given = {key for n in forward.graph.find_nodes(op="placeholder") for key in storages(n)}
    returned = [n for n in tree_leaves(output.args) if isinstance(n, fx.Node)]
    results = returned[: len(tensors_of(node))]
    return any(key in given for result in results for key in storages(result))
