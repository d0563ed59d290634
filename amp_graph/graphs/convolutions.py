"""How far apart the windows of a convolution are."""

from __future__ import annotations

from torch import fx
from torch._ops import OpOverload

from amp_graph.graphs.aten import arguments


def strides_of(node: fx.Node) -> tuple[int, ...]:
    """Return the strides of a convolution, one for each dimension or for all; () for any other
    node."""
    if not isinstance(node.target, OpOverload) or "conv" not in node.target._schema.name:
        return ()
    strides = arguments(node).get("stride", 1)
    each = (strides,) if isinstance(strides, int) else strides
    return tuple(s for s in each if isinstance(s, int))
