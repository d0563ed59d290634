"""Assignments of memory, `x.data = y`, in a graph of Dynamo's and in one that is retraced.

    set_(x, y); lower_version(x); mm(z, x)    ->    set_data(x, y); w = y.data; mm(z, w)

Traced, a fake `x` would have the memory of `y` before the assignment as well; as Dynamo up to 2.13
spells it, its shape, too. Since 2.14 there is an operator for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from amp_graph.graphs.aten import DATA, SET_DATA

# How Dynamo spells one: 2.11 and 2.13, 2.14.
SPELLED: Any = getattr(SET_DATA, "overloadpacket", torch.Tensor.set_)
UNCOUNT = "_lower_version_count_by_1"  # a function of Dynamo's that comes after it; 2.11, 2.13


class Assignments(NamedTuple):
    """The nodes that spell assignments, and what becomes of them.

    dropped: nodes that stand for nothing.
    moved: nodes that put an input into the memory of a value, with input and value.
    """

    dropped: Collection[fx.Node]
    moved: dict[fx.Node, tuple[fx.Node, fx.Node]]


def assignments(graph: fx.Graph, inputs: Sequence[Any]) -> Assignments:
    """Find the assignments in a graph. An assignment that is not in the result stays as it is.

    inputs: the inputs that the graph is called with, as they were before.
    """
    idle = _idle(graph)
    places = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    dropped, moved = set(idle), {}
    for node in graph.find_nodes(op="call_function", target=SPELLED):
        if node in idle or not _is_assignment(node):
            continue
        x, y = node.all_input_nodes
        place = places.get(x, len(inputs))
        if place < len(inputs) and _stays_alike(inputs[place], y) and not _is_elsewhere(x, y):
            dropped.update(node.users)
            moved[node] = x, y
    return Assignments(dropped, moved)


def _idle(graph: fx.Graph) -> set[fx.Node]:
    """Return the assignments that change nothing, as of `w.data = w.data.to(device)` on that
    device, or of all parameters where a module is told to move there, `self.part.to(x.device)`."""
    idle: set[fx.Node] = set()
    own = {}  # by the id of a value that is `x.data`, x; gone with the next assignment to it
    assigned = set()
    for node in graph.nodes:
        if node.target is DATA and "example_value" in node.meta:
            own[id(node.meta["example_value"])] = node.args[0]
        elif node.target is SPELLED:
            x, y = node.all_input_nodes[0], node.all_input_nodes[-1]
            is_own = own.get(id(y.meta.get("example_value"))) is x
            if is_own or _is_itself(x, y) or (x not in assigned and _is_as_it_was(x, y)):
                idle.add(node)
            else:
                assigned.add(x)
                own = {value: other for value, other in own.items() if other is not x}
        elif _is_uncount(node) and node.args[0] in idle:
            idle.add(node)
    return idle


def _is_itself(x: fx.Node, y: fx.Node) -> bool:
    """Whether a value is the object `x`, as `x.to(device)` is on that device."""
    fake = x.meta.get("example_value")
    while y is not x:
        first = y.args[0] if y.args else None
        if (
            fake is None
            or y.meta.get("example_value") is not fake
            or not isinstance(first, fx.Node)
        ):
            return False
        y = first
    return True


def _is_as_it_was(x: fx.Node, y: fx.Node) -> bool:
    """Whether a value is an alias of a whole input. Unknown up to torch 2.13, where the fake tensor
    of the input has the memory that is assigned to it."""
    if SPELLED is torch.Tensor.set_:
        return False
    before, value = x.meta.get("example_value"), y.meta.get("example_value")
    if not (type(before) is type(value) is FakeTensor):
        return False
    return _laid_out(before) == _laid_out(value)


def _laid_out(value: Tensor) -> tuple[Any, ...]:
    memory = value.untyped_storage()._cdata
    return memory, value.dtype, value.shape, value.stride(), value.storage_offset()


def _is_uncount(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == UNCOUNT


def _is_assignment(node: fx.Node) -> bool:
    """Whether a node is an assignment, and not a call of `set_`."""
    if node.target is not SPELLED or len(node.args) != 2:
        return False
    uncounts = [n for n in node.users if _is_uncount(n) and not n.users]
    return len(uncounts) == len(node.users) == (SPELLED is torch.Tensor.set_)


def _stays_alike(x: Any, y: fx.Node) -> bool:
    """Whether an input without a gradient stays as it was in all but memory."""
    value = y.meta.get("example_value")
    return (
        isinstance(x, Tensor)
        and not x.requires_grad
        and type(value) is FakeTensor
        and all(isinstance(size, int) for size in (*value.shape, *value.stride()))
        and (x.shape, x.stride()) == (value.shape, value.stride())
    )


def _is_elsewhere(x: fx.Node, y: fx.Node) -> bool:
    """Whether another input has that memory, or the input itself is a result."""
    memory = y.meta["example_value"].untyped_storage()._cdata
    return any(user.op == "output" for user in x.users) or any(
        node is not x
        and isinstance(value := node.meta.get("example_value"), Tensor)
        and value.untyped_storage()._cdata == memory
        for node in x.graph.find_nodes(op="placeholder")
    )
