"""How to read a node of an ATen graph: its operator, operands, results and memory."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._pytree import tree_leaves

CAST = torch.ops.aten._to_copy.default
CLAMP = torch.ops.aten.clamp.default


def op_name(node: fx.Node) -> str:
    """The operator as lists and reports spell it: "aten.add.Tensor", "placeholder", ..."""
    if node.op != "call_function":
        return node.op
    if isinstance(node.target, (OpOverload, HigherOrderOperator)):
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors that a node returns."""
    return [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]


def arguments(node: fx.Node) -> dict[str, Any]:
    """The operands of an operator by the names its schema gives them."""
    assert isinstance(node.target, OpOverload)
    names = (a.name for a in node.target._schema.arguments)
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def storages(node: fx.Node) -> list[Any]:
    """Keys of the memory that a node's tensors live in."""
    keys = []
    for tensor in tensors_of(node):
        try:
            keys.append(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # sparse and other tensors without storage
            keys.append(id(tensor))
    return list(dict.fromkeys(keys))


def written_operands(module: fx.GraphModule, node: fx.Node) -> Iterator[fx.Node]:
    """The operands that a node writes into, or may: a body that writes counts for all."""
    if isinstance(node.target, HigherOrderOperator):
        if any(_mutates(body) for body in bodies_of(module, node).values()):
            yield from node.all_input_nodes
        return
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return
    values = arguments(node)
    for argument in node.target._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for leaf in tree_leaves(values.get(argument.name)):
                if isinstance(leaf, fx.Node):
                    yield leaf


def bodies_of(module: fx.GraphModule, node: fx.Node) -> dict[str, fx.GraphModule]:
    """The graphs that a higher-order operator runs, by attribute name."""
    found = {}
    for operand in node.all_input_nodes:
        if operand.op == "get_attr":
            body = get_attribute(module, str(operand.target))
            if isinstance(body, fx.GraphModule):
                found[str(operand.target)] = body
    return found


def _mutates(body: fx.GraphModule) -> bool:
    return any(
        not isinstance(n.target, OpOverload) or n.target._schema.is_mutable
        for n in body.graph.nodes
        if n.op == "call_function" and n.target is not operator.getitem
    )


def get_attribute(module: torch.nn.Module, target: str) -> Any:
    return operator.attrgetter(target)(module)


def set_attribute(root: torch.nn.Module, target: str, value: Any) -> None:
    *path, name = target.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, torch.nn.Module())
        root = getattr(root, part)
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        root.register_buffer(name, value)
    else:
        setattr(root, name, value)
