"""Products in float32 on low-precision values, for CPUs that have no low-precision kernels.

    y = linear(x, w)   ->   y = linear(x.float(), w.float()).to(x.dtype)

PyTorch emulates such products element by element. Kernels for float32 are tens of times faster
(`scripts/emulation.py`), and the result is that of a matrix unit, which adds up in float32 too:
values are rounded where they are stored, before and after. For the backward pass operands are kept
as they came, in low precision; there the product is computed again and differentiated. NVCaffe
called this pseudo-FP16: storage in float16, math in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.autograd import Function
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

from amp_graph.cpu import emulates
from amp_graph.dtypes import LOW
from amp_graph.graphs.aten import arguments, mutated_operands, tensors_of
from amp_graph.ir import Color
from amp_graph.oplists import OpLists
from amp_graph.policy import Policy
from amp_graph.uncaptured import never_captured


def emulated_nodes(policy: Policy, lists: OpLists) -> Callable[[fx.Node], bool]:
    """Return a predicate for the nodes of emitted graphs that are to be computed `in_float32`."""
    return partial(_is_emulated, lists) if policy.emulation == "float32" else nothing_emulated


def nothing_emulated(node: fx.Node) -> bool:
    return False


def _is_emulated(lists: OpLists, node: fx.Node) -> bool:
    """Whether a node is a product on a CPU without kernels for its precision. Left out are nodes
    that draw random numbers, as computed again they would draw others; nodes that write into an
    operand, of which a widened copy would be written; and nodes whose operands an autocast region
    of the model's own casts."""
    listing = lists.lookup(node.target)
    results = tensors_of(node)
    if listing is None or listing.color is not Color.ALLOW or not results:
        return False
    operands = (t for n in node.all_input_nodes for t in tensors_of(n) if t.is_floating_point())
    if not all(t.device.type == "cpu" and emulates(t.dtype) for t in (*results, *operands)):
        return False
    return not (_draws(node) or mutated_operands(node))


def _draws(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        return True
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    given = arguments(node)
    dropout = [a.name for a in target._schema.arguments if a.name.startswith("dropout")]
    is_training = bool(given.get("train", True))
    return not dropout or (is_training and any(map(given.get, dropout)))


def in_float32(product: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes a product of low-precision tensors in float32."""

    def widened(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        return _Widened.apply(product, spec, *leaves)  # type: ignore[no-untyped-call]

    return widened


class _Widened(Function):
    @staticmethod
    def forward(ctx: Any, product: Callable[..., Any], spec: TreeSpec, *leaves: Any) -> Any:
        ctx.product, ctx.spec = product, spec
        ctx.others = [None if isinstance(x, Tensor) else x for x in leaves]
        ctx.save_for_backward(*[x if isinstance(x, Tensor) else None for x in leaves])
        ctx.set_materialize_grads(False)
        low = next(x.dtype for x in leaves if isinstance(x, Tensor) and x.dtype in LOW)
        args, kwargs = tree_unflatten(map(_wide, leaves), spec)
        result = product(*args, **kwargs)
        return tree_map_only(Tensor, lambda t: t.to(low), result)

    @staticmethod
    @never_captured(reason="the backward pass of a product that is emulated")
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        again, kept = torch.is_grad_enabled(), ctx.saved_tensors
        needed = [i for i, needs in enumerate(ctx.needs_input_grad[2:]) if needs]
        given = [*ctx.others]
        with torch.enable_grad():
            for i, saved in enumerate(kept):
                if saved is not None:
                    value = saved if again else saved.detach().requires_grad_(i in needed)
                    given[i] = _wide(value)
            args, kwargs = tree_unflatten(given, ctx.spec)
            results = tree_leaves(ctx.product(*args, **kwargs))
            pairs = zip(results, gradients, strict=True)
            ends = [(r, _wide(g)) for r, g in pairs if g is not None]
            found = torch.autograd.grad(
                [result for result, _ in ends],
                [given[i] for i in needed],
                [gradient for _, gradient in ends],
                create_graph=again,
                allow_unused=True,
            )
        back: list[Tensor | None] = [None] * len(given)
        for i, gradient in zip(needed, found, strict=True):
            back[i] = None if gradient is None else gradient.to(kept[i].dtype)
        return None, None, *back


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW else value
