"""Split attention: replace calls that would compute in float32 inside by their parts.

    out = scaled_dot_product_attention(q, k, v, m)      scaled  = mul(q, 0.25)
                                                        scores  = matmul(scaled, transpose(k))
                                                        masked  = add(scores, m)
                                                        weights = _safe_softmax(masked, -1)
                                                        out     = matmul(weights, v)

PyTorch's math kernel for attention casts low-precision operands to float32 and multiplies those.
Of its parts, each gets a colour of its own. Only calls that were painted ALLOW and would take that
kernel are split; what runs in a fused kernel stays whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from amp_graph.graphs.aten import arguments
from amp_graph.graphs.attention import attention, widens
from amp_graph.graphs.fake import fake_mode_of
from amp_graph.ir import Color, Paint


def may_split(module: fx.GraphModule) -> bool:
    """Whether the graph has calls to split, should they be painted low."""
    return any(widens(node) for node in module.graph.nodes)


def split_attention(module: fx.GraphModule, paints: Mapping[str, Paint]) -> fx.GraphModule:
    """Return the graph with such calls split, or `module` itself if it has none."""
    chosen = {n for n in module.graph.nodes if widens(n) and paints[n.name].color is Color.ALLOW}
    if not chosen:
        return module
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    with fake_mode_of(module) or contextlib.nullcontext():
        for node in module.graph.nodes:
            if node in chosen:
                new[node] = _write_parts(graph, node, new)
            else:
                new[node] = graph.node_copy(node, lambda old: new[old])
    return fx.GraphModule(module, graph, class_name="AtenGraph")


def _write_parts(graph: fx.Graph, call: fx.Node, new: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Write the parts of a call, and return the one that computes its result."""
    given = arguments(call)
    operands = {k: v for k, v in given.items() if isinstance(v, fx.Node) and "val" in v.meta}
    options = {k: v for k, v in given.items() if k not in operands}
    values = [node.meta["val"] for node in operands.values()]

    def run(*tensors: object) -> object:
        return attention(**dict(zip(operands, tensors, strict=True)), **options)  # type: ignore[arg-type]

    parts = make_fx(run, pre_dispatch=True)(*values)
    local: dict[fx.Node, fx.Node] = {}
    inputs = iter(operands.values())
    for part in parts.graph.nodes:
        if part.op == "placeholder":
            local[part] = new[next(inputs)]
        elif part.op == "output":
            result = local[part.args[0]]
            result.meta["val"] = call.meta["val"]  # of which the views that follow are views
            return result
        else:
            local[part] = graph.node_copy(part, lambda old: local[old])
            local[part]._rename(f"{call.name}_{part.name}")
            local[part].meta = {**call.meta, "val": part.meta["val"], "custom": {}}
    raise AssertionError("a trace ends in its output")
