"""Memory that a retraced graph does not tell of: what its values say they share is not all."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from amp_graph.capture.aten import bodies_of, is_retraced, storages, written_operands


def hidden_memory(traced: fx.GraphModule) -> Iterator[str]:
    """Writes of which the values in `meta` do not tell where they arrive."""
    writes = [n for n in traced.graph.nodes if any(written_operands(traced, n))]
    for node in writes:
        if node.target is torch.ops.aten.set_.source_Tensor:
            yield f"'{node.name}' puts a tensor into other memory (`x.data = y`)"
    for node in traced.graph.nodes if writes else ():
        if any(map(_returns_its_input, bodies_of(traced, node).values())):
            yield f"'{node.name}' returns memory of its operands, and the graph writes into memory"


def _returns_its_input(body: fx.GraphModule) -> bool:
    if not is_retraced(body):
        return False
    (output,) = body.graph.find_nodes(op="output")
    given = {key for n in body.graph.find_nodes(op="placeholder") for key in storages(n)}
    return any(key in given for n in output.all_input_nodes for key in storages(n))
