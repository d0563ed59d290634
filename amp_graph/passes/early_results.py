"""Early results: a result that the graph also computes with leaves it where it is made.

    features = relu(c)                  features = relu(c)
    logits   = mm(features, w)          inner    = leave_early(left, 0, features, float32)
    return [features, logits]           logits   = mm(inner, w)
                                        return [inner, logits]
    inputs: c, w                        inputs: c, w, left

Some code asks for the gradient of a returned value (Grad-CAM of features, `retain_grad`, a hook, a
penalty), which is only right if the logits are made from that very value. Widened or scaled at the
end of the graph, it would be a branch of its own with a gradient of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from amp_graph.boundary.early import EarlyResults
from amp_graph.graphs.aten import last_written, results_of, storages, widens_low
from amp_graph.graphs.grad_modes import grad_modes


def leave_early(left: EarlyResults, key: int, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Hand a result out, and return the value that the graph goes on with."""
    return left.leave(key, value, dtype)


def let_leave_early(
    module: fx.GraphModule, widened: frozenset[int]
) -> tuple[fx.GraphModule, frozenset[int], dict[int, int]]:
    """Return the graph with one more input, for the `EarlyResults` of a call; the positions of low
    results that are to become float32, `widened` and perhaps others; and the keys of the early
    results by position. Return `module` itself if there are none."""
    early = dict(_early_results(module, widened))
    if not early:
        return module, widened, {}
    dtypes = dict(early.values())
    keys = {value: key for key, value in enumerate(dtypes)}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        copies[node] = graph.node_copy(node)
    left = graph.placeholder("left")
    for node in module.graph.nodes:
        if node in copies:
            continue
        copy = copies[node] = graph.node_copy(node, copies.__getitem__)
        if node in keys:
            arguments = left, keys[node], copy, dtypes[node]
            copies[node] = graph.call_function(leave_early, arguments)
            copies[node].meta = {**node.meta}
        elif node.op == "output":
            results: Any = node.args[0]
            chosen = [early[i][0] if i in early else result for i, result in enumerate(results)]
            copy.args = (fx.map_arg(chosen, copies.__getitem__),)
    made_wide = {i for i, (value, dtype) in early.items() if value.meta["val"].dtype is not dtype}
    early_keys = {i: keys[value] for i, (value, _) in early.items()}
    changed = fx.GraphModule(module, graph, class_name=type(module).__name__)
    return changed, widened | made_wide, early_keys


def _early_results(
    module: fx.GraphModule, widened: frozenset[int]
) -> Iterator[tuple[int, tuple[fx.Node, torch.dtype]]]:
    """Return, by position, the value that leaves early and the dtype it leaves in. A value that is
    written to later, or shares memory with another result or an input, is left out."""
    if grad_modes(module.graph):
        return
    output, results = module.graph.output_node(), results_of(module)
    inputs = module.graph.find_nodes(op="placeholder")
    nodes = dict.fromkeys(r for r in (*results, *inputs) if isinstance(r, fx.Node))
    shared = Counter(key for node in nodes for key in storages(node))
    position = {node: n for n, node in enumerate(module.graph.nodes)}
    written = last_written(module)

    def is_apart(node: fx.Node) -> bool:
        return all(shared[k] <= 1 and written.get(k, 0) <= position[node] for k in storages(node))

    found: dict[fx.Node, torch.dtype] = {}
    for i, result in enumerate(results):
        if not isinstance(result, fx.Node) or not isinstance(result.meta.get("val"), Tensor):
            continue
        dtype = torch.float32 if i in widened else result.meta["val"].dtype
        value = _read_on(result)
        others = {*value.users, *result.users} - {output, result}
        if (
            others
            and value.op == "call_function"
            and dtype.is_floating_point
            and is_apart(value)
            and is_apart(result)
            and found.setdefault(value, dtype) is dtype
        ):
            yield i, (value, dtype)


def _read_on(result: fx.Node) -> fx.Node:
    """Return the value that the graph goes on with: the result, or the low value that it is the
    float32 form of, if that is read in low precision, too. Read in float32 it is then widened once
    more."""
    operand: Any = result.args[0] if widens_low(result) else None
    return operand if operand is not None and len(operand.users) > 1 else result
