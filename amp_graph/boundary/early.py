"""Results that leave a graph where they are made, since the graph goes on with them.

    value ---> leave ---> left ---> outside
      |                     :
      +------------------> inner ---> the rest of the graph

The gradient of what is computed from `inner` goes to `left`, as if the graph ended there, for
whoever asks for the gradient of `left`. If nobody does, it goes straight to `value`: else it would
be multiplied by 1/S and by S again, and widened and narrowed, for nothing.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from amp_graph.boundary.crossing import go_out, is_heard, leave, not_captured
from amp_graph.boundary.scale import Scale
from amp_graph.gradients.engine import Probe
from amp_graph.gradients.transforms import applied


class EarlyResults:
    """The early results of one call of a graph. `left`: those that have left, by key."""

    def __init__(self, scale: Scale | None):
        self.left: dict[int, Tensor] = {}
        self._scale = scale

    def leave(self, key: int, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Hand a value out in a dtype, and return what the graph is to go on with."""
        is_as_it_is = self._scale is None and dtype is value.dtype
        if is_as_it_is or not (value.requires_grad and torch.is_grad_enabled()):
            return value
        scale = self._scale
        left = value.to(dtype) if scale is None else leave(scale, value, dtype=dtype)
        self.left[key] = left
        inner: Tensor = applied(_GoOn, scale, left, value, _probe.tensor)
        return inner


class _GoOn(Function):
    @staticmethod
    def forward(
        ctx: Any, scale: Scale | None, left: Tensor, value: Tensor, probe: Tensor
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.left, ctx.dtype = scale, weakref.ref(left), left.dtype
        return value.detach()

    @staticmethod
    @not_captured
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        if gradient is not None and _is_wanted(ctx.left()):
            return None, go_out(ctx.scale, gradient, ctx.dtype), None, None
        return None, None, gradient, None


def _is_wanted(left: Tensor | None) -> bool:
    """Whether somebody looks at a value's gradient, in the backward pass that runs."""
    return left is not None and (is_heard(left) or _probe.sees_a_selection())


_probe = Probe()
