"""Custom autograd functions, from the two graphs that Dynamo makes of their halves.

PyTorch's operator for them is for compilers. Run as it is, it interprets both graphs node by node;
it makes a class at each call, which holds what was saved for backward until Python's garbage
collector is run; it does not notice that a saved tensor was written to; and the second graph turns
autograd off, as if nobody asked for a second derivative (torch 2.13).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from amp_graph.graphs.aten import CUSTOM_FUNCTION
from amp_graph.graphs.grad_modes import grad_modes
from amp_graph.uncaptured import never_captured

# The names of its marks in 2.13; with other names in another version the operator is kept.
MARKS = {"dirty_idx", "non_differentiable_idx", "saved_for_backward_idx"}


def can_apply(node: fx.Node) -> bool:
    marks = node.kwargs.keys()
    return node.target is CUSTOM_FUNCTION and "saved_for_backward_idx" in marks <= MARKS


def applied(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    *args: Any,
    dirty_idx: Sequence[int] = (),
    non_differentiable_idx: Sequence[int] = (),
    saved_for_backward_idx: Sequence[int] = (),
) -> Any:
    marks = dirty_idx, non_differentiable_idx, saved_for_backward_idx
    return _Applied.apply(forward, backward, marks, *args)  # type: ignore[no-untyped-call]


class _Applied(torch.autograd.Function):
    """`marks` are positions: among the results, of what was written to and of what has no gradient;
    and among what the first half hands to the second, of what was given to `save_for_backward`.
    Under autocast Dynamo recorded both halves in it, so that the second runs in it as well."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, marks: Any, *args: Any) -> Any:
        results, handed_on = forward(*args)
        each = results if isinstance(results, tuple | list) else (results,)
        dirty, without_gradient, ctx.saved = marks
        ctx.mark_dirty(*(each[i] for i in dirty))
        ctx.mark_non_differentiable(*(each[i] for i in without_gradient))
        ctx.save_for_backward(*(handed_on[i] for i in ctx.saved))
        ctx.others = {i: v for i, v in enumerate(handed_on) if i not in ctx.saved}
        kinds = {v.device.type for v in args if isinstance(v, torch.Tensor)}
        around = filter(torch.is_autocast_enabled, kinds)
        ctx.autocasts = [(kind, torch.get_autocast_dtype(kind)) for kind in around]
        ctx.backward_graph = backward
        return results

    @staticmethod
    @never_captured(reason="a custom autograd function that amp_graph captured")
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled() and grad_modes(ctx.backward_graph.graph):
            raise RuntimeError(
                "a second derivative was asked for of a custom autograd function whose backward "
                "turns autograd on or off; amp_graph captures no more of it than the first. Keep "
                "its module out of the converted model, or call it under torch.compiler.disable"
            )
        handed_on = ctx.others | dict(zip(ctx.saved, ctx.saved_tensors, strict=True))
        with contextlib.ExitStack() as stack:
            for kind, dtype in ctx.autocasts:
                stack.enter_context(torch.autocast(kind, dtype))
            found = ctx.backward_graph(*gradients, *(handed_on[i] for i in sorted(handed_on)))
        return None, None, None, *(found if isinstance(found, tuple | list) else (found,))


def second_halves(graph: fx.Graph) -> list[str]:
    """The names of the graphs that are the second half of a custom function."""
    return [str(n.args[1].target) for n in graph.nodes if can_apply(n)]


def differentiable(backward: fx.GraphModule) -> fx.GraphModule:
    """The second half as its author wrote it: autograd's engine turns recording on or off for it.
    Dynamo turned it off at its begin and on at its end; a `no_grad` in between left no trace."""
    graph = copy.deepcopy(backward.graph)
    calls = [n for n in graph.nodes if n.op == "call_function"]
    modes = [*grad_modes(graph)]
    if len(modes) < 2 or (modes[0], modes[-1]) != (calls[0], calls[-1]):
        return backward
    if (modes[0].args, modes[-1].args) != ((False,), (True,)):
        return backward
    graph.erase_node(modes[0]), graph.erase_node(modes[-1])
    return fx.GraphModule(backward, graph)
