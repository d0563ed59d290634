"""Where parameters enter a graph, in groups whose gradients go out together.

What enters is an alias of each parameter, or of its low-precision weight, with one autograd node
behind the aliases of a group. Once gradients have gone out of them nothing of the call remains in
them, and they stand for the next one. A call that comes before that, as the second of two whose
losses are added, gets aliases of its own: gradients of several calls meet in float32, not in low
precision.

What stands keeps the AccumulateGrad nodes of its parameters alive. These are for the shapes that
their parameters had when they were made, and for the stream that they were made on; a step captured
as a CUDA graph on another one could not use them. So all that stands, in all models, is let go of
when a call brings parameters that are not as what stands in their place was made for, or comes on
another stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from amp_graph.training.crossing import go_out, not_captured
from amp_graph.training.engine import (
    CAN_RUN_WHEN_READY,
    copy_all_,
    current_streams,
    has_process_group,
    runs_when_ready,
)
from amp_graph.training.scale import Scale
from amp_graph.training.transforms import applied, are_active, are_plain

# Bytes of float32 parameters per group, the last parameters first: as in DistributedDataParallel,
# whose communication can start when the first, small group is done. On CPU small groups are faster.
FIRST_GROUP_BYTES, GROUP_BYTES = 2**20, {"cpu": 2**20, "other": 25 * 2**20}

Pick = Callable[[Sequence[Any]], tuple[Any, ...]]
PLAIN = {Tensor, Parameter}
_shape, _is_leaf = attrgetter("shape"), attrgetter("is_leaf")
HOOKS = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


@dataclass(eq=False)
class Entrance:
    """That of parameters of one device and dtype, whose gradients leave together.

    device: that they are on.
    slots: where their values, in float32 or low precision, go among the graph's inputs.
    owners: for each slot, which of the parameters it is for, counted within the group.
    fresh: the owners whose first gradient is made for them alone.
    is_awaited: whether their gradients leave as soon as they are there, for what happens to them
        during the backward pass, or for their memory. On CPU, where nothing is done meanwhile, it
        is a little faster if all leave at the end.
    may_stand: whether what has entered stands for the next call.
    """

    device: torch.device
    slots: tuple[int, ...]
    owners: tuple[int, ...]
    fresh: frozenset[int]
    is_awaited: bool
    may_stand: bool
    pick_values: Pick
    pick_tensors: Pick
    _last: _Entered | None = field(default=None, init=False)

    def enter(self, scale: Scale | None, values: list[Any], args: Sequence[Any]) -> None:
        """Have the parameters among `args`, the captured inputs, enter: each of `values` that is
        for one gives way to what gradients go out of, in the parameter's dtype, divided by S."""
        given, tensors = self.pick_values(values), self.pick_tensors(args)
        # A watch puts hooks on what it sees.
        may_stand = self.may_stand and not are_active() and (scale is None or scale.watch is None)
        last = self._last
        if last is not None and not last.is_for(given, tensors):
            last = None
        entered = last.take(scale) if last is not None and may_stand else ()
        if not entered:
            could_stand = {*map(type, tensors)} <= PLAIN and all(map(_is_leaf, tensors))
            if could_stand and last is None:
                _let_go_of_all()
            free: set[bool] = set()
            entered = applied(_Enter, free, scale, given, self.owners, self.fresh, *tensors)
            if self.is_awaited:
                runs_when_ready(entered[0].grad_fn)
            if could_stand:
                self._last = _Entered(entered if may_stand else (), free, scale, given, tensors)
        for slot, value in zip(self.slots, entered, strict=True):
            values[slot] = value

    def let_go(self) -> None:
        if self._last is not None:
            self._last.let_go()


_all: weakref.WeakSet[Entrance] = weakref.WeakSet()
_streams: dict[torch.device, frozenset[torch.Stream]] = {}


def follow_streams(devices: Iterable[torch.device]) -> None:
    """Let go of all that stands if one of these devices is given work on another stream."""
    for device in devices:
        streams = current_streams([device])
        if _streams.get(device) != streams:
            _streams[device] = streams
            _let_go_of_all()


def _let_go_of_all() -> None:
    for entrance in [*_all]:
        entrance.let_go()


class _Entered:
    """What entered in a call, and what for.

    entered: it, as long as it stands.
    free: not empty while no call uses it; threads put into it and take out of it.
    """

    __slots__ = ("_free", "_given", "_ids", "_memory", "_scale", "_shapes", "entered")

    def __init__(
        self,
        entered: tuple[Tensor, ...],
        free: set[bool],
        scale: Scale | None,
        given: tuple[Tensor, ...],
        tensors: tuple[Tensor, ...],
    ):
        self.entered = entered  # keeps the `tensors` alive
        self._free, self._scale, self._given = free, scale, given
        self._ids = [*map(id, given), *map(id, tensors)]
        self._memory = [*map(Tensor.data_ptr, tensors)]
        self._shapes = [*map(_shape, tensors)]

    def is_for(self, given: Sequence[Tensor], tensors: Sequence[Tensor]) -> bool:
        """Whether the same would enter for these. Parameters that were moved or resized
        (`p.data = x`) are the same objects."""
        return (
            [*map(id, given), *map(id, tensors)] == self._ids
            and [*map(Tensor.data_ptr, tensors)] == self._memory
            and [*map(_shape, tensors)] == self._shapes
        )

    def take(self, scale: Scale | None) -> tuple[Tensor, ...]:
        """What stands, if it does and no other call uses it; then this one does from now on."""
        entered = self.entered
        try:
            return entered if scale is self._scale and self._free.pop() else ()
        except KeyError:
            return ()

    def let_go(self) -> None:
        self.entered = self._given = ()


class _Enter(Function):
    @staticmethod
    def forward(
        ctx: Any,
        free: set[bool],
        scale: Scale | None,
        values: Sequence[Tensor],
        owners: Sequence[int],
        fresh: Container[int],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.free, ctx.scale, ctx.tensors = free, scale, tensors
        ctx.owners, ctx.fresh = owners, fresh
        return tuple([value.detach() for value in values])

    @staticmethod
    @not_captured
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        given = [(i, g) for i, g in zip(ctx.owners, grads, strict=True) if g is not None]
        again = torch.is_grad_enabled()
        is_float32 = ctx.tensors[0].dtype is torch.float32
        fused = is_float32 and not again and are_plain([g for _, g in given])
        found = _go_out_together(ctx, given) if fused else _go_out_one_by_one(ctx, given)
        if not again:  # else more gradients will come, of what was done to these
            ctx.free.add(True)
        return (None, None, None, None, None, *map(found.get, range(len(ctx.tensors))))


def _go_out_together(ctx: Any, given: Sequence[tuple[int, Tensor]]) -> dict[int, Tensor]:
    """Float32 gradients, each the sum of its parts, in a few fused calls. They are laid out as
    their tensors are, or AccumulateGrad would copy them again."""
    first = dict(reversed(given))  # float32 ones before others
    found = {i: first[i] for i in ctx.fresh if i in first and first[i].dtype is torch.float32}
    narrow = {i: g for i, g in first.items() if i not in found} if found else first
    if narrow:
        wide = [*map(torch.empty_like, map(ctx.tensors.__getitem__, narrow))]
        copy_all_(wide, [*narrow.values()])
        found.update(zip(narrow, wide, strict=True))
    for i, gradient in given if len(first) < len(given) else ():
        if gradient is not first[i]:
            found[i].add_(gradient)
    if ctx.scale is not None and found:
        gradients = [*found.values()]
        ctx.scale.checked.unscale_(gradients, ctx.scale.inverse(gradients[0].device))
    return found


def _go_out_one_by_one(ctx: Any, given: Iterable[tuple[int, Tensor]]) -> dict[int, Tensor]:
    """Gradients that are recorded for a derivative of their own, sparse, or of a vmap."""
    found: dict[int, Tensor] = {}
    for i, gradient in given:
        crossed = go_out(ctx.scale, gradient, ctx.tensors[i].dtype)
        found[i] = found[i] + crossed if i in found else crossed
    return found


def grouped(
    slots: Sequence[tuple[int, int]], args: Sequence[Tensor], fresh: Container[int]
) -> Iterator[Entrance]:
    """An entrance for each group of parameters. `slots`: of each, its position among `args` and
    where a value for it goes. `fresh`: positions of those whose first gradient is for them alone.
    """
    members: list[tuple[int, int]] = []
    size, limit = 0, FIRST_GROUP_BYTES
    for position, its_slots in groupby(reversed(slots), key=itemgetter(0)):
        parameter = args[position]
        if members and (size >= limit or not _may_join(parameter, args[members[0][0]])):
            yield _entrance(members, args, fresh)
            members, size = [], 0
            limit = GROUP_BYTES.get(parameter.device.type, GROUP_BYTES["other"])
        members += its_slots
        size += parameter.nbytes
    if members:
        yield _entrance(members, args, fresh)


def _may_join(one: Tensor, other: Tensor) -> bool:
    """Parameters with hooks leave alone: the hooks of one that the loss does not depend on would be
    called with None for those of its group."""
    are_alike = one.device == other.device and one.dtype == other.dtype
    return are_alike and not (_has_hooks(one) or _has_hooks(other))


def _has_hooks(parameter: Tensor) -> bool:
    return any(hooks(parameter) for hooks in HOOKS)


def _entrance(
    members: Sequence[tuple[int, int]], args: Sequence[Tensor], fresh: Container[int]
) -> Entrance:
    positions = sorted({position for position, _ in members})
    owners = {position: k for k, position in enumerate(positions)}
    slots = tuple(slot for _, slot in sorted(members))  # of one parameter, float32 comes first
    first = args[positions[0]]
    is_heard = _has_hooks(first) or has_process_group()
    entrance = Entrance(
        first.device,
        slots,
        owners=tuple(owners[position] for position, _ in sorted(members)),
        fresh=frozenset(k for k, position in enumerate(positions) if position in fresh),
        is_awaited=is_heard or first.device.type != "cpu",
        may_stand=CAN_RUN_WHEN_READY or not is_heard,
        pick_values=picker(slots),
        pick_tensors=picker(positions),
    )
    _all.add(entrance)
    return entrance


def picker(positions: Sequence[int]) -> Pick:
    """What takes these out of a sequence, in C: it does so at every call of a model."""
    if len(positions) > 1:
        return itemgetter(*positions)
    if not positions:
        return lambda values: ()
    (only,) = positions
    return lambda values: (values[only],)
