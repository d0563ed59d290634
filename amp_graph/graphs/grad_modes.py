"""Grad modes: where in a graph autograd records.

Private names of PyTorch used here:

    torch.autograd.grad_mode._enter_inference_mode, _exit_inference_mode
                                            how Dynamo spells the mode in a graph
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch
from torch import fx
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode

from amp_graph.graphs.aten import SET_GRAD_ENABLED, results_of, widens_low, written_operands

INFERENCE_MODE = (_enter_inference_mode, _exit_inference_mode)


def grad_modes(graph: fx.Graph) -> dict[fx.Node, bool]:
    """Map each node that changes whether autograd records to whether it does afterwards. Inference
    mode counts as `no_grad`: a graph is for tensors that autograd may take as well."""
    found: dict[fx.Node, bool] = {}
    records, before = torch.is_grad_enabled(), []
    for node in graph.nodes:
        if node.target is SET_GRAD_ENABLED:
            records = bool(node.args[0])
        elif node.target is _enter_inference_mode:
            before.append(records)
            records = not node.args[0]
        elif node.target is _exit_inference_mode:
            records = before.pop()
        else:
            continue
        found[node] = records
    return found


def is_switch(node: fx.Node, captured: Container[str]) -> bool:
    """Whether a node of an emitted graph switches recording for a cast, and was not captured."""
    return node.target is SET_GRAD_ENABLED and node.name not in captured


def mode_after(graph: fx.Graph) -> bool | None:
    """Return whether autograd records after a graph; None if the graph does not change it."""
    changes = grad_modes(graph)
    return changes[next(reversed(changes))] if changes else None


def recorded_nodes(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the operators that run while autograd records, given whether it does now, in the
    caller."""
    changes, records, found = grad_modes(graph), torch.is_grad_enabled(), set()
    for node in graph.nodes:
        if node in changes:
            records = changes[node]
        elif records and node.op == "call_function":
            found.add(node)
    return frozenset(found)


def differentiated(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the recorded operators that are computed from a value that needs a gradient, as far as
    inputs tell."""
    recorded, found = recorded_nodes(graph), set[fx.Node]()
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            is_one = value.requires_grad
        else:
            is_one = node in recorded and any(n in found for n in node.all_input_nodes)
        if is_one:
            found.add(node)
    return frozenset(found)


def last_casts(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield casts to float32 that can be made after the graph: they are only returned, nothing is
    written to after them, which they might have read before, and they are recorded if the code
    after the graph is."""
    if grad_modes(module.graph):
        return
    results = results_of(module)
    for node in reversed(module.graph.nodes):
        if any(True for _ in written_operands(module, node)):
            return
        if node in results and len(node.users) == 1 and widens_low(node):
            yield node
