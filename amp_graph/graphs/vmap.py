"""`torch.vmap` inside a model, retraced as the operators on whole batches that it makes.

    _add_batch_dim(x, 0, 1)
    y = x @ w                      ->      y = bmm(x, expand(w))
    _remove_batch_dim(y, 1, 8, 0)

Other transforms of functorch have no such form: the operators of `torch.func.grad` or `jvp` are not
there before it runs.

Private names of PyTorch used here:

    torch._functorch.predispatch           what Dynamo captures of transforms
    torch._C._functorch.maybe_current_level, _vmap_decrement_nesting
                                           to leave one whose retrace failed
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import fx

from amp_graph.errors import CaptureError

DETACH = torch.ops.aten.detach.default
TRANSFORMS = ("torch._functorch", "torch._C._functorch")
# Dynamo's functions for a vmap, each with how much deeper one is inside of it afterwards.
STEPS = {
    "lazy_load_decompositions": 0,
    "_vmap_increment_nesting": 1,
    "_add_batch_dim": 0,
    "_remove_batch_dim": 0,
    "_vmap_decrement_nesting": -1,
    # Around a `requires_grad_()` of a value in the graph. Nothing that it makes differentiable
    # leaves the graph (seen on 2.13), or Dynamo would have ended it before.
    "set_inplace_requires_grad_allowed": 0,
}


def inside_vmap(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes from the beginning of each vmap to its end. Raises CaptureError if there is
    another transform, or a gradient is taken."""
    inside: set[fx.Node] = set()
    depth = 0
    for node in graph.nodes:
        step = 0
        if node.target is torch.autograd.grad:
            raise CaptureError(f"'{node.name}' takes a gradient inside of the graph")
        if getattr(node.target, "__module__", "").startswith(TRANSFORMS):
            name = getattr(node.target, "__name__", "")
            if name not in STEPS:
                raise CaptureError(f"'{node.name}' is of a functorch transform other than vmap")
            step = STEPS[name]
        if depth or step:
            inside.add(node)
        depth += step
    return inside


def begins_of_transforms(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Map each node inside a vmap or another transform to the node that begins the outermost
    one."""
    found: dict[fx.Node, fx.Node] = {}
    depth, begin = 0, None
    for node in graph.nodes:
        name = str(getattr(node.target, "__name__", ""))
        if name.endswith("_increment_nesting"):
            begin = begin if depth else node
            depth += 1
        if depth and begin is not None:
            found[node] = begin
        depth -= name.endswith("_decrement_nesting")
    return found


@contextlib.contextmanager
def all_left() -> Iterator[None]:
    """Leave, on exit, all transforms that were entered inside."""
    before = torch._C._functorch.maybe_current_level() or 0
    try:
        yield
    finally:
        while (torch._C._functorch.maybe_current_level() or 0) > before:
            torch._C._functorch._vmap_decrement_nesting()


def drop_unused_detaches(graph: fx.Graph) -> None:
    """Erase detaches that nobody reads. Below autograd, which saves a detached operand or result,
    they are captured too."""
    for node in reversed(graph.nodes):
        if node.target is DETACH and not node.users:
            graph.erase_node(node)
