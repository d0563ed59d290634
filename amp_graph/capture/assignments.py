"""Assignments of memory, `x.data = y`, in a graph of Dynamo's and in one that is retraced.

    set_(x, y); lower_version(x); mm(z, x)    ->    set_data(x, y); w = y.data; mm(z, w)

As Dynamo up to 2.14 spells one it cannot be traced: a fake `x` has the memory, and the shape, that
it was given last, all along. From 2.15 on it is a copy, which can.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from amp_graph.capture.aten import DATA

UNCOUNT = "_lower_version_count_by_1"  # a function of Dynamo's that comes after it; 2.11, 2.13


class Assignments(NamedTuple):
    """What to do with the nodes by which they are spelled.

    dropped: the nodes that stand for nothing.
    moved: those that put an input into the memory of a value, and both.
    """

    dropped: Collection[fx.Node]
    moved: dict[fx.Node, tuple[fx.Node, fx.Node]]


def assignments(graph: fx.Graph, inputs: Sequence[Any]) -> Assignments:
    """`inputs`: what the graph is called with, as it is before. Those that are not among the result
    stay as they are."""
    idle = _idle(graph)
    places = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    dropped, moved = set(idle), {}
    for node in graph.find_nodes(op="call_function", target=torch.Tensor.set_):
        if node in idle or len(node.args) != 2 or not _is_spelled_out(node):
            continue
        x, y = node.all_input_nodes
        place = places.get(x, len(inputs))
        if place < len(inputs) and _stays_alike(inputs[place], y) and not _is_elsewhere(x, y):
            dropped.update(node.users)
            moved[node] = x, y
    return Assignments(dropped, moved)


def _idle(graph: fx.Graph) -> set[fx.Node]:
    """Those of `x.data` as it was, like that of `w.data = w.data.to(device)` where it is there."""
    idle: set[fx.Node] = set()
    own = {}  # by the id of a value that is `x.data`, x; gone with the next assignment to it
    for node in graph.nodes:
        if node.target is DATA and "example_value" in node.meta:
            own[id(node.meta["example_value"])] = node.args[0]
        elif node.target is torch.Tensor.set_:
            x, y = node.all_input_nodes[0], node.all_input_nodes[-1]
            if own.get(id(y.meta.get("example_value"))) is x:
                idle.add(node)
            else:
                own = {value: other for value, other in own.items() if other is not x}
        elif _is_uncount(node) and node.args[0] in idle:
            idle.add(node)
    return idle


def _is_uncount(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == UNCOUNT


def _is_spelled_out(node: fx.Node) -> bool:
    """Whether it is an assignment, not a call of `set_`."""
    return len(node.users) == 1 and all(_is_uncount(n) and not n.users for n in node.users)


def _stays_alike(x: Any, y: fx.Node) -> bool:
    """Whether an input that needs no gradient is what it was in all but memory."""
    value = y.meta.get("example_value")
    return (
        isinstance(x, Tensor)
        and not x.requires_grad
        and type(value) is FakeTensor
        and all(isinstance(size, int) for size in (*value.shape, *value.stride()))
        and (x.shape, x.stride()) == (value.shape, value.stride())
    )


def _is_elsewhere(x: fx.Node, y: fx.Node) -> bool:
    """Whether other inputs have that memory, or the input itself is a result."""
    memory = y.meta["example_value"].untyped_storage()._cdata
    return any(user.op == "output" for user in x.users) or any(
        node is not x
        and isinstance(value := node.meta.get("example_value"), Tensor)
        and value.untyped_storage()._cdata == memory
        for node in x.graph.find_nodes(op="placeholder")
    )
