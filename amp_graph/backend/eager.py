"""Eager: the form of a graph that runs operator by operator.

    torch.ops.aten.mm.default(x, w)      ->   torch.mm(x, w)
    torch.ops.aten.index.Tensor(x, [i])  ->   x[i] (see `indexing`)
    torch.ops.aten.sym_size.int(x, 0)    ->   x.size(0)
    the same, emulated                   ->   that of widened values, rounded
    tag_activation_checkpoint(body, x)   ->   torch.utils.checkpoint.checkpoint(body, x)
    autograd_function_apply(f, b, x)     ->   a torch.autograd.Function of f and b
    flex_attention(q, k, v, f, ...)      ->   the same, compiled by itself (see `flex_attention`)
    grouped_mm_fallback(x, w, ends)      ->   _grouped_mm(x, w, ends) (see `grouped_products`)
    gru(x, h, weights) on a CPU          ->   the same, h in float32 (see `wide_state`)
    (-1) ** n                            ->   pow(-1, n)
    scores.masked_fill(mask, -3.4e38)    ->   the same, with the lowest number of `scores` (`fills`)

The Python bindings of the ATen operators do the same as the overloads that a graph names, and take
a shorter way into the dispatcher. The checkpoint operator is for compilers, which keep its random
numbers themselves: run as it is, it recomputes with other ones, and dropout drops other elements.
That of custom functions is for compilers, too (see `custom_function`). A power of a negative number
would be printed as `-1 ** n`, which Python reads as `-(1 ** n)` (torch 2.11 - 2.15).

Private names of PyTorch used here:

    torch._C._nn    bindings that are nowhere else
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils.checkpoint import checkpoint

from amp_graph.backend.custom_function import applied, can_apply, differentiable, second_halves
from amp_graph.backend.emulation import in_float32, nothing_emulated
from amp_graph.backend.fills import saturating_fill
from amp_graph.backend.flex_attention import compiled_attention
from amp_graph.backend.grouped_products import grouped_product
from amp_graph.backend.wide_state import wide_state
from amp_graph.graphs.aten import CAST, CHECKPOINT, SELECTIVE, written_operands

BINDINGS = (torch, torch._C._nn, torch.Tensor)  # where they are looked for; 2.11 - 2.15
OTHER_ARGUMENTS = {"to"}  # bindings that do not take the arguments of their operator
NATIVE = (BuiltinFunctionType, MethodDescriptorType)  # not Python code of torch


def _asserted(truth: bool, message: str) -> None:
    if not truth:
        raise RuntimeError(message)


def _indexed(x: torch.Tensor, indices: list[torch.Tensor]) -> torch.Tensor:
    return x[tuple(indices)]


INDEXING: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.index.Tensor: _indexed,
    torch.ops.aten.index_put.default: torch.index_put,
    torch.ops.aten.index_put_.default: torch.index_put_,
}
PLAIN: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.sym_size.int: torch.Tensor.size,
    torch.ops.aten._assert_scalar.default: _asserted,
}


def eager(
    module: fx.GraphModule, emulated: Callable[[fx.Node], bool] = nothing_emulated
) -> fx.GraphModule:
    """Return the graph with other callables in place of its operators, bodies included; the module
    itself if there is nothing to replace.

    emulated: tells which nodes are to be computed `in_float32`.
    """
    bodies = {name: m for name, m in module.named_children() if isinstance(m, fx.GraphModule)}
    replaced = {name: eager(body, emulated) for name, body in bodies.items()}
    for half in second_halves(module.graph):
        replaced[half] = differentiable(replaced[half])
    called = {n.name: c for n in module.graph.nodes if (c := _called_for(module, n)) is not None}
    called |= compiled_attention(module)
    for node in filter(emulated, module.graph.nodes):
        called[node.name] = in_float32(called.get(node.name, node.target))
    if not called and all(replaced[name] is body for name, body in bodies.items()):
        return module
    graph = copy.deepcopy(module.graph)
    for node in graph.nodes:
        if node.name in called:
            node.op, node.target = "call_function", called[node.name]
    changed = fx.GraphModule(module, graph, class_name=type(module).__name__)
    changed.meta.update(module.meta)
    for name, body in replaced.items():
        setattr(changed, name, body)
    return changed


def code_of(module: fx.GraphModule) -> Callable[..., Any]:
    """Return a function that runs a graph of Dynamo's."""

    def run(*args: Any) -> Any:
        # FX compiles it when its code is asked for. Without, `forward` is a call of the module, by
        # which FX prints where in the graph an error is.
        _ = module.code
        return module.forward(*args)

    return run


def _called_for(module: fx.GraphModule, node: fx.Node) -> Callable[..., Any] | None:
    if node.target is CHECKPOINT:
        return _checkpointed(_written(module, node))
    if can_apply(node):
        return applied
    if node.target is operator.pow and repr(node.args[0]).startswith("-"):
        return pow
    if node.target is CAST and _is_cast(node):
        return torch.Tensor.to
    if not isinstance(node.target, OpOverload):
        return saturating_fill(node)
    plain = PLAIN.get(node.target) or indexing(node) or binding(node.target)
    return grouped_product(node) or wide_state(node) or plain


def indexing(node: fx.Node) -> Callable[..., Any] | None:
    """Return what reads or writes at indices as Python code does; None for other operators.

    Dimensions that are not indexed are left out, of which `binding` tells, and so are indices
    without a dimension: of such a one `x[i]` asks a GPU.
    """
    called = INDEXING.get(node.target)
    if called is None:
        return None
    indices: Any = node.args[1]
    values = [i.meta.get("val") if isinstance(i, fx.Node) else None for i in indices]
    is_alike = all(isinstance(v, torch.Tensor) and v.dim() for v in values)
    return called if is_alike else None


def binding(overload: OpOverload) -> Callable[..., Any] | None:
    """Return the Python binding that calls an ATen operator with the same arguments; None if there
    is none.

    A binding finds the overload by its arguments. Three kinds of operators are left out: those
    without a tensor, as a binding that makes one looks at the default device; those with a
    `reduction`, for which bindings have another default; and those with a list of tensors that may
    hold None, as in `y[:, i] = v`, which bindings refuse (torch 2.13).
    """
    namespace, _, name = overload._schema.name.partition("::")
    arguments = overload._schema.arguments
    types = [str(a.type) for a in arguments]
    is_alike = any("Tensor" in t for t in types) and "List[Optional[Tensor]]" not in types
    if namespace != "aten" or not is_alike or name in OTHER_ARGUMENTS:
        return None
    if any(a.name == "reduction" for a in arguments):
        return None
    found = (getattr(home, name, None) for home in BINDINGS)
    return next((b for b in found if isinstance(b, NATIVE)), None)


def _is_cast(node: fx.Node) -> bool:
    """Whether a node does nothing but change the dtype. (`to` returns a value that has the dtype
    already.)"""
    value = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    return [*node.kwargs] == ["dtype"] and value is not None and value.dtype != node.kwargs["dtype"]


def _written(module: fx.GraphModule, node: fx.Node) -> frozenset[int]:
    """Return the positions of the checkpoint's operands that its body writes to and that are inputs
    of the graph."""
    written = {n for n in written_operands(module, node) if n.op == "placeholder"}
    return frozenset(i for i, given in enumerate(node.args[1:]) if given in written)


def _checkpointed(written: frozenset[int]) -> Callable[..., Any]:
    """Return a non-reentrant checkpoint; it recomputes the same graph as a reentrant one would.

    written: positions of operands that the body writes to: buffers, such as a count of batches. The
        model's code does not hand buffers to `checkpoint`, which saves what it is given, and raises
        in the backward pass if that was written to. So they go past it.
    """

    def checkpointed(body: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        kwargs["use_reentrant"] = False
        if SELECTIVE in body.meta:
            kwargs["context_fn"] = body.meta[SELECTIVE]
        if not written:
            return checkpoint(body.forward, *args, **kwargs)

        def run(*saved: Any) -> Any:
            return body.forward(*(args[i] if i in written else s for i, s in enumerate(saved)))

        return checkpoint(run, *(None if i in written else a for i, a in enumerate(args)), **kwargs)

    return checkpointed
