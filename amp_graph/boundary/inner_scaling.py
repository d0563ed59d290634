"""Scaling inside of a graph, by operators of its own.

    x ----> enter ----> x          y ----> leave ----> y, in a dtype     values
    dx / S <---------- dx          dy * S <---------- dy                 gradients

Where a graph is compiled, what is done here becomes part of the kernels beside it, and nothing of
ours is called between its backward pass and its parameters. The operators are made of others, so
that AOTAutograd traces what they do, and caches it by their names. S is read when a backward pass
comes there, by all of a graph that is compiled at once: what goes out was multiplied by the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from amp_graph.boundary.crossing import times


@dataclass(frozen=True)
class Inside:
    """The gradients of a graph that are scaled inside: all of them.

    parameters, inputs: positions of the inputs out of which gradients go, parameters and others.
    results: positions of the results into which gradients come.
    devices: the devices on each of which the graph takes S, after its other inputs. The last input
        serves only to have autograd come to it when the parameters have their gradients.
    """

    parameters: tuple[int, ...]
    inputs: tuple[int, ...]
    results: tuple[int, ...]
    devices: tuple[torch.device, ...]


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, end: Tensor | None = None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(scale, end)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        scale, end = ctx.saved_tensors
        ended = None if end is None else torch.zeros_like(end)
        if gradient is None:
            return None, None, ended
        return times(gradient, scale.reciprocal(), gradient.dtype), None, ended


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(scale)
        ctx.dtype = x.dtype
        return x.to(dtype, copy=True)  # an alias would leave a compiled graph as the value does

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None]:
        (scale,) = ctx.saved_tensors
        return None if gradient is None else times(gradient, scale, ctx.dtype), None, None


_library = torch.library.Library("amp_graph", "FRAGMENT")  # for as long as the operators are there
_library.define("enter(Tensor(a) x, Tensor scale, Tensor? end=None) -> Tensor(a)")
_library.define("leave(Tensor x, Tensor scale, ScalarType dtype) -> Tensor")
_library.impl("enter", _Enter.apply, "CompositeImplicitAutograd")
_library.impl("leave", _Leave.apply, "CompositeImplicitAutograd")
ENTER = torch.ops.amp_graph.enter.default
LEAVE = torch.ops.amp_graph.leave.default
