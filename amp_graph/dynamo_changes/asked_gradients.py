"""`requires_grad_()` on a value of the graph does not end the graph where it changes nothing.

    h = embedding(x)               h = embedding(x)
    h.requires_grad_()      ->     y = lora(h)
    y = lora(h)

So models do that fine-tune frozen layers under `checkpoint`, which in its reentrant form takes no
gradient of its parameters unless its input requires one (`enable_input_require_grads` and
`position_bias.requires_grad = True` in transformers). Others begin a sum of losses with a zero that
requires one, `torch.zeros(1, requires_grad=True)`. A captured graph has no such need, and what is
made of trained parameters has a gradient anyway. Dynamo ends the graph at an assignment and at such
a zero, and at a call if anything that is made of the value leaves the graph. Here it does so only
if a result would not require a gradient otherwise, or if the graph takes gradients itself.

Private names of PyTorch used here, since 2.13; before, nothing is changed:

    torch._dynamo.variables.builtin.SetAttrBuiltinVariable._call_setattr
    torch._dynamo.output_graph.OutputGraph._check_requires_grad_intermediate_outputs
    ..., .leaf_var_creation_order
    torch._dynamo.variables.TensorVariable
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables import TensorVariable, builtin

from amp_graph.dynamo_changes.known_values import fake_of
from amp_graph.dynamo_changes.replaced import existing

ASSIGNS = getattr(builtin, "SetAttrBuiltinVariable", None)
MAKING = (torch.tensor, torch.zeros, torch.ones, torch.full, torch.zeros_like, torch.ones_like)


def _assign(method: Any, setter: Any, frame: Any, x: Any, name: Any, value: Any) -> Any:
    """Treat `x.requires_grad = True` as `x.requires_grad_()`, and skip it if nothing changes."""
    if isinstance(x, TensorVariable) and _constant(name) == "requires_grad":
        asked = _constant(value)
        if asked is fake_of(x).requires_grad:
            return value
        if asked is True and not x.source:
            x.call_method(frame, "requires_grad_", [], {})
            return value
    return method(setter, frame, x, name, value)


def _make(method: Any, function: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    """Treat `torch.zeros(1, requires_grad=True)` as `torch.zeros(1).requires_grad_()`."""
    asked = kwargs.get("requires_grad")
    if asked is None or function.value not in MAKING or _constant(asked.realize()) is not True:
        return method(function, frame, args, kwargs)
    others = {name: value for name, value in kwargs.items() if name != "requires_grad"}
    made = method(function, frame, args, others)
    made.call_method(frame, "requires_grad_", [], {})
    return made


def _constant(variable: Any) -> Any:
    return variable.as_python_constant() if variable.is_python_constant() else None


def _end(method: Any, graph: Any, results: Sequence[Any], frame: Any) -> None:
    asked = {v.as_proxy().node for v in graph.leaf_var_creation_order if not v.source}
    if asked:
        found = (v for v in results if isinstance(v, TensorVariable) and v.requires_grad)
        if not {v.as_proxy().node for v in found} <= _differentiable(graph.graph, asked):
            method(graph, results, frame)


def _differentiable(graph: fx.Graph, asked: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes that depend on a value which requires a gradient without being `asked`
    to."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is torch.autograd.grad:
            return set()
        values = node.meta.get("example_value")
        values = values if isinstance(values, (tuple, list)) else [values]
        requires = any(isinstance(v, Tensor) and v.requires_grad for v in values)
        is_first = node.op in ("placeholder", "get_attr")
        if requires and node not in asked and (is_first or found & {*node.all_input_nodes}):
            found.add(node)
    return found


AROUND = (_make,)
CHANGES = existing(
    (ASSIGNS, "_call_setattr", _assign),
    (OutputGraph, "_check_requires_grad_intermediate_outputs", _end),
)
