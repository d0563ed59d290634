"""Checkpointed parts of graphs that run operator by operator.

Dynamo captures `torch.utils.checkpoint` as an operator for compilers, which keep its random numbers
themselves. Run as it is, it recomputes with other ones: dropout would drop other elements.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from amp_graph.capture.aten import SELECTIVE

OPERATOR = torch.ops.higher_order.tag_activation_checkpoint


def with_checkpoints(module: fx.GraphModule) -> fx.GraphModule:
    """The graph with `torch.utils.checkpoint` in place of the operator; itself if it has none."""
    bodies = {name: m for name, m in module.named_children() if isinstance(m, fx.GraphModule)}
    replaced = {name: with_checkpoints(body) for name, body in bodies.items()}
    found = module.graph.find_nodes(op="call_function", target=OPERATOR)
    if not found and all(replaced[name] is body for name, body in bodies.items()):
        return module
    graph = copy.deepcopy(module.graph)
    for node in graph.find_nodes(op="call_function", target=OPERATOR):
        node.target = _checkpointed
    changed = fx.GraphModule(module, graph, class_name=type(module).__name__)
    changed.meta.update(module.meta)
    for name, body in replaced.items():
        setattr(changed, name, body)
    return changed


def _checkpointed(body: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    """Reentrant or not in the model's code, what a graph recomputes is the same."""
    kwargs["use_reentrant"] = False
    if SELECTIVE in body.meta:
        kwargs["context_fn"] = body.meta[SELECTIVE]
    return checkpoint(body.forward, *args, **kwargs)
