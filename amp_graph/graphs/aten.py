"""How to read a node of an ATen graph: its operator, operands, results and memory.

Private names of PyTorch used here:

    torch._C._set_grad_enabled, torch._C._autograd._get_data_attr,
    torch.amp.autocast_mode._enter_autocast, _exit_autocast
                                how Dynamo spells modes and `x.data` in a graph
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.utils._pytree import tree_leaves

from amp_graph.dtypes import LOW

CAST = torch.ops.aten._to_copy.default
ADD = torch.ops.aten.add.Tensor
CLAMP = torch.ops.aten.clamp.default
FLEX_ATTENTION = torch.ops.higher_order.flex_attention
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
CUSTOM_FUNCTION = torch.ops.higher_order.autograd_function_apply
COND = torch.ops.higher_order.cond
RECURRENT = (
    torch.ops.aten.lstm.input,
    torch.ops.aten.gru.input,
    torch.ops.aten.rnn_tanh.input,
    torch.ops.aten.rnn_relu.input,
)
SET_GRAD_ENABLED = torch._C._set_grad_enabled
ENTER_AUTOCAST: Callable[..., Any] = _enter_autocast
EXIT_AUTOCAST: Callable[..., Any] = _exit_autocast
WITH_AUTOCAST = torch.ops.higher_order.wrap_with_autocast  # how torch.export spells a region
DATA: Callable[..., Any] = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]


@fx.has_side_effect
def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    tensor.data = value


# `x.data = y`: an operator since 2.14.
SET_DATA: Callable[..., Any] = (
    torch.ops.aten.shallow_copy_data_.default
    if hasattr(torch.ops.aten, "shallow_copy_data_")
    else set_data
)
SELECTIVE = "_checkpoint_context_fn"  # in the meta of a body: what selective checkpointing saves
IN_REGION = "amp_graph_in_region"  # in the meta of a graph: all of it is in an autocast region
WHY_NOT_RETRACED = "amp_graph_why_not_retraced"  # in the meta of a body that is as Dynamo left it
ASKS_FOR_LOW = "amp_graph_asks_for_low"  # in the meta of a graph captured under autocast: a node


def is_operator(node: fx.Node) -> bool:
    """Whether the lists may name a node's operator. Of the operators with bodies only
    flex_attention is listed, as it computes more than its bodies do."""
    return isinstance(node.target, OpOverload) or node.target is FLEX_ATTENTION


def op_name(node: fx.Node) -> str:
    """Return an operator's name as lists and reports spell it: "aten.add.Tensor", "placeholder",
    ..."""
    if node.op != "call_function":
        return node.op
    if isinstance(node.target, (OpOverload, HigherOrderOperator)):
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))


def widens_low(node: fx.Node) -> bool:
    """Whether a node only casts low precision to float32."""
    if node.target is not CAST or node.kwargs != {"dtype": torch.float32}:
        return False
    operand = node.args[0]
    return isinstance(operand, fx.Node) and operand.meta["val"].dtype in LOW


def has_any_inside(module: fx.GraphModule, targets: Container[Any]) -> bool:
    """Whether a graph, or one inside it, calls one of these targets."""
    graphs = (m.graph for m in module.modules() if isinstance(m, fx.GraphModule))
    return any(node.target in targets for graph in graphs for node in graph.nodes)


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """Return the fake tensors that a node returns."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    return [v for v in tree_leaves(value) if isinstance(v, torch.Tensor)]


def results_of(module: fx.GraphModule) -> list[Any]:
    """Return the results of a graph of Dynamo's: nodes and constants."""
    results: Any = module.graph.output_node().args[0]
    return list(results)


def device_of(node: fx.Node) -> str:
    """Return the kind of device that a node computes on."""
    return next(
        (t.device.type for n in (node, *node.all_input_nodes) for t in tensors_of(n)), "cpu"
    )


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return an operator's operands by the names in its schema or signature."""
    if isinstance(node.target, OpOverload):
        names = [a.name for a in node.target._schema.arguments]
    else:
        assert is_operator(node)
        names = [*inspect.signature(node.target).parameters]  # type: ignore[arg-type]
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def operands_named(node: fx.Node, chosen: Callable[[str], bool]) -> list[fx.Node]:
    """Return the operands given for arguments of chosen names."""
    named = [value for name, value in arguments(node).items() if chosen(name)]
    return [leaf for leaf in tree_leaves(named) if isinstance(leaf, fx.Node)]


def mutated_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands that an operator writes into by its schema."""
    if not node.target._schema.is_mutable:  # type: ignore[union-attr]
        return []
    declared = node.target._schema.arguments  # type: ignore[union-attr]
    written = {a.name for a in declared if a.alias_info and a.alias_info.is_write}
    return operands_named(node, written.__contains__)


def dtype_position(node: fx.Node) -> int | None:
    """Return the position of the argument that asks for the result's dtype; None if there is
    none."""
    if not isinstance(node.target, OpOverload):
        return None
    names = [a.name for a in node.target._schema.arguments]
    return names.index("dtype") if "dtype" in names else None


def module_path(node: fx.Node, names: Mapping[str, str]) -> str:
    """Return the path of the innermost module that a node belongs to. `names`: by id, see
    `Names`."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    key, (path, *_) = list(stack.items())[-1]
    known = names.get(key.partition("@")[0])
    if known is not None:
        return known
    path = re.sub(r"\._modules\['([^']*)'\]|\[['\"]?([^'\"\]]*)['\"]?\]", r".\1\2", str(path))
    return path.partition(".")[2].partition(".")[2]  # what it is found by: L.self


def storages(node: fx.Node) -> list[Any]:
    """Return keys of the memory that a node's tensors live in."""
    keys = []
    for tensor in tensors_of(node):
        try:
            keys.append(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # sparse and other tensors without storage
            keys.append(id(tensor))
    return list(dict.fromkeys(keys))


def written_operands(module: fx.GraphModule, node: fx.Node) -> Iterator[fx.Node]:
    """Yield the operands that a node writes into, or may."""
    if isinstance(node.target, HigherOrderOperator):
        bodies = bodies_of(module, node).values()
        leaves = tree_leaves((node.args, node.kwargs))
        operands = [v for v in leaves if isinstance(v, fx.Node) and v.op != "get_attr"]
        yield from dict.fromkeys(o for body in bodies for o in _written_by_body(body, operands))
    elif node.target is SET_DATA:
        yield node.all_input_nodes[0]
    elif isinstance(node.target, OpOverload):
        yield from mutated_operands(node)


def last_written(module: fx.GraphModule) -> dict[Any, int]:
    """Return the position of the last write into each memory, by the memory's key."""
    return {
        key: position
        for position, node in enumerate(module.graph.nodes)
        for operand in written_operands(module, node)
        for key in storages(operand)
    }


def _written_by_body(body: fx.GraphModule, operands: list[fx.Node]) -> list[fx.Node]:
    """Return the operands that a body writes into; its inputs are the last of the operands. All of
    them count if the body is not in ATen form, or if it writes into an input and takes other
    inputs, as a backward body does."""
    inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
    is_aten = is_retraced(body)
    written = {
        key for n in body.graph.nodes for o in written_operands(body, n) for key in storages(o)
    }
    reached = [not written.isdisjoint(storages(i)) for i in inputs]
    if is_aten and not any(reached):
        return []
    if not is_aten or len(inputs) > len(operands):
        return operands
    last = operands[len(operands) - len(inputs) :]
    return [o for o, is_reached in zip(last, reached, strict=True) if is_reached]


def is_retraced(module: fx.GraphModule) -> bool:
    """Whether a graph is in ATen form. A body that could not be retraced is as Dynamo left it."""
    return all("val" in n.meta for n in module.graph.find_nodes(op="placeholder"))


def captured_of(node: fx.Node, captured: Container[str]) -> fx.Node:
    """Return the captured node that an emitted node stands for, or is a cast of (or the clamp in
    front of a cast); without one, the first node that it is made from."""
    while node.name not in captured and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def bodies_of(module: fx.GraphModule, node: fx.Node) -> dict[str, fx.GraphModule]:
    """Return the graphs that a higher-order operator runs, by attribute name."""
    found = {}
    for operand in node.all_input_nodes:
        if operand.op == "get_attr":
            body = get_attribute(module, str(operand.target))
            if isinstance(body, fx.GraphModule):
                found[str(operand.target)] = body
    return found


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
