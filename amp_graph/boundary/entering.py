"""Parameters entering a graph, and their gradients going out of it.

An autograd node hands out aliases of a group's values; it widens, unscales and checks the gradients
of the group in a few fused calls. Of several calls before one backward pass, the node of the first
does so for all. It also hands out something that stands for the group's parameters laid end to end
in float32, and the others enter from there, so that the engine runs it after them. The gradients of
a later call go there as one tensor, widened, and the engine adds those tensors up. So gradients of
several calls meet in float32, in two launches per call, however many parameters there are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from amp_graph.boundary.crossing import go_out, not_captured
from amp_graph.boundary.scale import Scale
from amp_graph.gradients.engine import add_all_, copy_all_
from amp_graph.gradients.transforms import applied, are_plain

FEW = 4  # tensors whose gradients are as well added up one by one
Part = tuple[int, Tensor]  # of a gradient, and whose: a position within the group


@dataclass(frozen=True)
class Call:
    """The state of one call that its autograd nodes need.

    owners: for each value that enters, which parameter of the group it is for.
    fresh: the owners whose first gradient is made for them alone.
    have_gone: called when gradients have gone out.
    """

    scale: Scale | None
    owners: Sequence[int]
    fresh: Collection[int]
    have_gone: Callable[[], object]


def enter(call: Call, values: Sequence[Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return aliases of `values`, out of which gradients go to `tensors`, the parameters they are
    for."""
    entered: tuple[Tensor, ...] = applied(_Enter, call, values, *tensors)
    return entered


def enter_first(
    call: Call, values: Sequence[Tensor], tensors: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return such aliases for the first call before a backward pass, and a tensor that other calls
    enter from."""
    *entered, together = applied(_EnterFirst, call, values, *tensors)
    return tuple(entered), together


def enter_later(
    call: Call, values: Sequence[Tensor], tensors: Sequence[Tensor], together: Tensor
) -> tuple[Tensor, ...]:
    """Return such aliases for another call before the same backward pass. Its gradients go out with
    those of the first."""
    entered: tuple[Tensor, ...] = applied(_EnterLater, call, values, together, *tensors)
    return entered


class _Enter(Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, values: Sequence[Tensor], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.tensors = call, tensors
        return tuple([value.detach() for value in values])

    @staticmethod
    @not_captured
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, None, *_gone_out(ctx, *_given(ctx, grads))


class _EnterFirst(Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, values: Sequence[Tensor], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        largest = max(tensors, key=Tensor.numel)
        length = sum(map(Tensor.numel, tensors))
        together = largest.as_strided((length,), (0,)).detach()  # of no memory; nobody reads it
        return *_Enter.forward(ctx, call, values, *tensors), together

    @staticmethod
    @not_captured
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        *own, together = grads
        of_others = [] if together is None else [*enumerate(_laid_out(together, ctx.tensors))]
        return None, None, *_gone_out(ctx, *_given(ctx, own), of_others)


class _EnterLater(Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, values: Sequence[Tensor], together: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        return _Enter.forward(ctx, call, values, *tensors)

    @staticmethod
    @not_captured
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        (given, can_be_fused), tensors = _given(ctx, grads), ctx.tensors
        is_whole = len(dict(given)) == len(tensors)
        if not is_whole or len(tensors) < FEW or not can_be_fused:
            return None, None, None, *_gone_out(ctx, given, can_be_fused)
        together = tensors[0].new_empty(sum(map(Tensor.numel, tensors)))
        _add_up(given, dict(enumerate(_laid_out(together, tensors))))
        return None, None, together, *[None] * len(tensors)


def _given(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[list[Part], bool]:
    """Return the gradients that there are, and whether they can go out in fused calls."""
    given = [(i, g) for i, g in zip(ctx.call.owners, grads, strict=True) if g is not None]
    if torch.is_grad_enabled():  # more will come, of what is done to these
        return given, False
    if given:
        ctx.call.have_gone()
    is_float32 = ctx.tensors[0].dtype is torch.float32
    return given, is_float32 and are_plain([g for _, g in given])


def _gone_out(
    ctx: Any, given: Sequence[Part], can_be_fused: bool, of_others: Sequence[Part] = ()
) -> Iterator[Tensor | None]:
    """Return the gradient of each parameter: the sum of what is given, divided by S. Parts
    `of_others` are only read."""
    go_out = _go_out_together if can_be_fused else _go_out_one_by_one
    return map(go_out(ctx, given, of_others).get, range(len(ctx.tensors)))


def _go_out_together(
    ctx: Any, given: Sequence[Part], of_others: Sequence[Part]
) -> dict[int, Tensor]:
    """Send gradients out in a few fused calls. They are laid out as their tensors are, or
    AccumulateGrad would copy them again."""
    call, tensors = ctx.call, ctx.tensors
    first = dict(reversed(given))  # float32 ones before others
    sums = {i: first[i] for i in call.fresh if i in first and first[i].dtype is torch.float32}
    parts = [*given, *of_others]
    if len(sums) < len(parts):  # else each is its own sum
        missing = dict(parts).keys() - sums.keys()
        made = map(torch.empty_like, map(tensors.__getitem__, missing))
        sums.update(zip(missing, made, strict=True))
        _add_up(parts, sums)
    if call.scale is not None and sums:
        gradients = [*sums.values()]
        call.scale.checked.unscale_(gradients, call.scale.inverse(gradients[0].device))
    return sums


def _go_out_one_by_one(
    ctx: Any, given: Sequence[Part], of_others: Sequence[Part]
) -> dict[int, Tensor]:
    """Send gradients out that are recorded for a derivative of their own, sparse, or of a vmap."""
    found: dict[int, Tensor] = {}
    for i, gradient in (*given, *of_others):
        crossed = go_out(ctx.call.scale, gradient, ctx.tensors[i].dtype)
        found[i] = found[i] + crossed if i in found else crossed
    return found


def _add_up(parts: Sequence[Part], sums: Mapping[int, Tensor]) -> None:
    """Write the sum of each one's parts where it goes, which may be its first part."""
    first = dict(reversed(parts))
    copied = [i for i, part in first.items() if part is not sums[i]]
    if copied:
        copy_all_([*map(sums.__getitem__, copied)], [*map(first.__getitem__, copied)])
    others = parts if len(first) < len(parts) else ()
    while others := [(i, part) for i, part in others if part is not first[i]]:
        first = dict(reversed(others))
        add_all_([*map(sums.__getitem__, first)], [*first.values()])


def _laid_out(together: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    """Return the view of each tensor in a tensor of all of them laid end to end."""
    parts = together.split([*map(Tensor.numel, like)])
    return map(Tensor.view_as, parts, like)
