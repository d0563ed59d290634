"""Crossing the boundary of a scaled graph: the autograd functions, and their factors.

Gradients are multiplied by the loss scale S where they come into a graph and by 1/S where they go
out of it. Second derivatives: a gradient penalty sends gradients through the backward pass, which
is a graph like any other, and gradients that left it, divided by S, are where they come in. So a
crossing in either direction is a multiplication by some factor, and its derivative crosses the
other way, with the same factor (that is transposition) times S coming in, or times 1/S going out.
The factors alternate: 1, 1/S, 1 ... for what enters, 1, S, 1 ... for what leaves; inside, gradients
of any order are S times the true ones. `torch.amp.GradScaler`'s recipe for gradient penalties has
the same factors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from amp_graph.boundary.scale import Scale, ScaleInputs
from amp_graph.gradients.engine import OUTSIDE, backward_pass, check_and_unscale_, look_at_
from amp_graph.gradients.transforms import applied, are_plain, for_all
from amp_graph.uncaptured import never_captured

# In a model that takes gradients inside, Dynamo would capture the backward passes.
not_captured = never_captured(reason="the boundary of a graph of amp_graph")


def enter_input(scale: Scale, tensor: Tensor, value: Tensor) -> Tensor:
    """Hand a value in for a tensor, which need not live on: its gradient goes out divided by S."""
    entered: Tensor = _EnterInput.apply(scale, value, tensor)  # type: ignore[no-untyped-call]
    return entered


def go_out(scale: Scale | None, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Send a gradient out, in a dtype, divided by S."""
    if scale is None:
        return gradient.to(dtype)
    return _cross(gradient, scale.inverse(gradient.device), dtype, scale, False)


def leave(
    scale: Scale, result: Tensor, shares: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """Hand a result out, in another dtype if one is given; its gradient comes in times S. If it
    shares memory with another it cannot be written to, since a write would reach the other unseen.
    """
    left: Tensor = applied(_Leave, scale, result, shares, dtype or result.dtype)
    return left


def leave_wide_(scale: Scale | None, results: list[Any], positions: Iterable[int]) -> None:
    """Hand results out in float32, each in the place of a low-precision one, which need not live
    on; their gradients come in times S, in the dtypes of those. One that is there twice stays one.
    """
    wide: dict[int, Tensor] = {}
    for i in positions:
        result = results[i]
        if id(result) not in wide:
            if scale is not None and result.requires_grad:
                wide[id(result)] = leave(scale, result, dtype=torch.float32)
            else:
                wide[id(result)] = result.float()
        results[i] = wide[id(result)]


def enter_unscaled(scale: Scale, tensor: Tensor) -> Tensor:
    """Hand a tensor in whose gradient the graph divides by S itself."""
    entered: Tensor = applied(_EnterUnscaled, scale, tensor)
    return entered


def leave_scaled_(inputs: ScaleInputs, results: list[Any], positions: Iterable[int]) -> None:
    """Hand results out, each in its place, whose gradients the graph multiplies by S itself, which
    is chosen when they come in. One that is there twice stays one."""
    left: dict[int, Tensor] = {}
    for i in positions:
        result = results[i]
        if not result.requires_grad:
            continue
        if id(result) not in left:
            left[id(result)] = applied(_LeaveScaled, inputs, result)
        results[i] = left[id(result)]


def has_left(node: Any) -> bool:
    """Whether an autograd node is that of a result which has left a graph."""
    return isinstance(node, (_Leave._backward_cls, _LeaveScaled._backward_cls))


def write_back(scale: Scale, written: Tensor, value: Tensor) -> None:
    """Record that a graph wrote into a tensor, through the value that had entered for it: itself,
    if none had. A write into a leaf that requires a gradient can only have been unrecorded."""
    if written.is_leaf and written.requires_grad:
        increment_version(written)
    else:
        _WriteBack.apply(scale, written, value)  # type: ignore[no-untyped-call]


def follow(tensor: Tensor, value: Tensor) -> None:
    """Put a tensor into the memory that the value which had entered for it was put into (`x.data =
    y`)."""
    is_plain = type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided
    if is_plain and value.data_ptr() != tensor.data_ptr():
        tensor.data = value.data


def is_heard(tensor: Tensor) -> bool:
    """Whether something is done with a tensor's own gradient."""
    return bool(tensor._backward_hooks) or tensor.retains_grad


def carries_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def carries_none(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.requires_grad


class _EnterInput(Function):
    @staticmethod
    def forward(ctx: Any, scale: Scale, value: Tensor, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.dtype = scale, tensor.dtype
        ctx.is_own = _is_own(scale, tensor)
        return value.detach()

    @staticmethod
    @not_captured
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        if gradient is None:
            return None, None, None
        if ctx.is_own:
            return None, None, go_out(ctx.scale, gradient, ctx.dtype)
        factor = ctx.scale.inverse(gradient.device)
        return None, None, _go_out_to_others(ctx.scale, gradient, factor, ctx.dtype)


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, scale: Scale, value: Tensor, shares: bool, dtype: torch.dtype) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.dtype = scale, value.dtype
        if dtype is not value.dtype:
            return value.to(dtype)
        # A detached alias may be written to in place. Returned as it is, the value becomes a view
        # that autograd refuses to have written to.
        return value if shares else value.detach()

    @staticmethod
    @not_captured
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        incoming = None if gradient is None else _come_in(ctx.scale, gradient, ctx.dtype)
        return None, incoming, None, None


class _EnterUnscaled(Function):
    @staticmethod
    def forward(ctx: Any, scale: Scale, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.is_own = scale, _is_own(scale, tensor)
        return tensor.detach()

    @staticmethod
    @not_captured
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        if gradient is not None and not ctx.is_own and are_plain([gradient]):
            spill = ctx.scale.spill_on(gradient.device)
            if spill is not None:
                look_at_([gradient], spill)
        return None, gradient


class _LeaveScaled(Function):
    @staticmethod
    def forward(ctx: Any, inputs: ScaleInputs, value: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.inputs, ctx.scale = inputs, inputs.scale
        return value.detach()

    @staticmethod
    @not_captured
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        if gradient is not None:
            ctx.inputs.choose(gradient, torch.is_grad_enabled())
        return None, gradient


class _WriteBack(Function):
    @staticmethod
    def forward(ctx: Any, scale: Scale, written: Tensor, value: Tensor) -> Tensor:
        ctx.mark_dirty(written)
        ctx.scale, ctx.dtype, ctx.is_of_view = scale, value.dtype, written._is_view()
        return written

    @staticmethod
    @not_captured
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        # For a view autograd would take None for its whole base (torch 2.13).
        overwritten = torch.zeros_like(gradient) if ctx.is_of_view else None
        return None, overwritten, _come_in(ctx.scale, gradient, ctx.dtype)


class _Cross(Function):
    """Multiply by a factor on the way in or out."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        value: Tensor, factor: Tensor, dtype: torch.dtype, scale: Scale, is_coming_in: bool
    ) -> Tensor:
        return times(value, factor, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        value, ctx.factor, _, ctx.scale, ctx.is_coming_in = inputs
        ctx.dtype = value.dtype

    @staticmethod
    @not_captured
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if ctx.is_coming_in:  # what had come in may be made of what others train (GradNorm)
            factor = ctx.factor * ctx.scale.inverse(gradient.device)
            return _go_out_to_others(ctx.scale, gradient, factor, ctx.dtype), None, None, None, None
        create_graph = torch.is_grad_enabled()
        incoming = gradient * ctx.factor if create_graph else gradient
        factor = ctx.factor * ctx.scale.factor(incoming, create_graph, double_backward=True)
        return _cross(gradient, factor, ctx.dtype, ctx.scale, True), None, None, None, None


def _is_own(scale: Scale, tensor: Tensor) -> bool:
    """Whether a tensor's gradient goes to a graph of the same model, out of which it came, or to an
    input of a reentrant checkpoint, that runs again in a backward pass."""
    node: Any = tensor.grad_fn
    if node is None:
        return backward_pass() != OUTSIDE
    return has_left(node) and node.scale is scale


def _come_in(scale: Scale, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    create_graph = torch.is_grad_enabled()
    factor = scale.factor(gradient, create_graph)
    if not create_graph:
        return times(gradient, factor, dtype)
    return _cross(gradient, factor.clone(), dtype, scale, True)


def _go_out_to_others(scale: Scale, gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Send a gradient out to a tensor that the model does not own, times a factor, and tell the
    scale of an overflow."""
    spill = None if torch.is_grad_enabled() else scale.spill_on(gradient.device)
    if spill is None or gradient.is_complex() or not are_plain([gradient]):
        return _cross(gradient, factor, dtype, scale, False)
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
    check_and_unscale_([wide], spill, factor)
    return wide.to(dtype)


def _cross(
    value: Tensor, factor: Tensor, dtype: torch.dtype, scale: Scale, is_coming_in: bool
) -> Tensor:
    if not torch.is_grad_enabled():
        return times(value, factor, dtype)
    apply: Any = _Cross.apply
    return for_all(lambda v: apply(v, factor, dtype, scale, is_coming_in), value)


def times(value: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product, computed in at least float32: S and 1/S are beyond what float16 holds."""
    if value.dtype is dtype is torch.float32:
        return value * factor
    if value.dtype is torch.float32 and are_plain([value]):  # in one call, without the product
        return torch.mul(value, factor, out=torch.empty_like(value, dtype=dtype))
    wide = torch.promote_types(value.dtype, torch.float32)
    return (value.to(wide) * factor).to(dtype)
