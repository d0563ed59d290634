"""Captured graphs as they would be had the model been on a CUDA device; none is needed."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from cuda_autocast import as_cuda, cuda_device
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map

from amp_graph.dynamo_changes.recurrent_layers import recurrent_layers_whole
from amp_graph.graphs.aten import get_attribute, set_attribute

aten = torch.ops.aten
KEPT = ("is_parameter", "module_path", "stack_trace")
# These want the device itself, to put something there.
TO_A_DEVICE = (aten.to.device, aten.to.dtype_layout)


def on_cuda(captured: fx.GraphModule) -> fx.GraphModule:
    """A copy of an ATen graph whose values are fake tensors on a CUDA device."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
    with torch.no_grad(), mode, enable_python_dispatcher(), recurrent_layers_whole():
        return _moved(captured)


def _moved(captured: fx.GraphModule) -> fx.GraphModule:
    graph, root = fx.Graph(), torch.nn.Module()
    new: dict[fx.Node, fx.Node] = {}
    for node in captured.graph.nodes:
        target, (args, kwargs) = node.target, tree_map(cuda_device, (node.args, node.kwargs))
        if target in TO_A_DEVICE:
            dtype = node.meta["val"].dtype
            target, args, kwargs = aten.to.dtype, (args[0], dtype), {}
        args, kwargs = fx.node.map_arg((args, kwargs), new.__getitem__)
        copy = new[node] = graph.create_node(node.op, target, args, kwargs, node.name)
        copy.meta = {key: node.meta[key] for key in KEPT if key in node.meta}
        if node.op == "get_attr":
            value = get_attribute(captured, str(target))
            value = _moved(value) if isinstance(value, fx.GraphModule) else value
            set_attribute(root, str(target), value)
        if node.op != "output":
            copy.meta["val"] = _value(node, copy)
    return fx.GraphModule(root, graph)


def _value(node: fx.Node, copy: fx.Node) -> Any:
    """What the operator returns, so that views share memory, or what it returned when captured."""
    if isinstance(copy.target, OpOverload) or copy.op == "call_function":
        values = fx.node.map_arg((copy.args, copy.kwargs), lambda n: n.meta["val"])
        with contextlib.suppress(Exception):  # kernels that ask for a CUDA build; values of bodies
            return copy.target(*values[0], **values[1])
    return as_cuda(node.meta.get("val"))
