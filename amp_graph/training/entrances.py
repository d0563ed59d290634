"""Where parameters enter a graph, in groups whose gradients go out together.

What enters is an alias of each parameter, or of its low-precision weight, with one autograd node
behind the aliases of a group. Once gradients have gone out of them nothing of the call remains in
them, and they stand for the next one. A call that comes before that, as the second of two whose
losses are added, gets aliases of its own, which stand likewise: gradients of several calls
meet in float32, not in low precision.

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
from functools import partial
from itertools import count, groupby
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from amp_graph.modules import living
from amp_graph.training.engine import (
    CAN_RUN_WHEN_READY,
    current_streams,
    has_process_group,
    runs_when_ready,
)
from amp_graph.training.entering import Call, enter, enter_first, enter_later
from amp_graph.training.scale import Scale
from amp_graph.training.transforms import are_active

# Bytes of float32 parameters per group, the last parameters first. On CPU small groups are faster;
# on a GPU few are, of which the second pass finds much in its caches. Among several processes as in
# DistributedDataParallel, whose communication can start when the first, small group is done.
CPU_GROUP_BYTES, GROUP_BYTES = 2**20, 64 * 2**20
FIRST_BYTES_SENT, BYTES_SENT = 2**20, 25 * 2**20
CALLS = 64  # whose aliases stand, those that no backward pass came for among them

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
    _standing: _Standing | None = field(default=None, init=False)

    def enter(self, scale: Scale | None, values: list[Any], args: Sequence[Any]) -> None:
        """Have the parameters among `args`, the captured inputs, enter: each of `values` that is
        for one gives way to what gradients go out of, in the parameter's dtype, divided by S."""
        given, tensors = self.pick_values(values), self.pick_tensors(args)
        # A watch puts hooks on what it sees.
        may_stand = self.may_stand and not are_active() and (scale is None or scale.watch is None)
        standing = self._standing
        if standing is not None and not standing.is_for(given, tensors):
            standing = None
        entered = standing.take(scale) if standing is not None and may_stand else None
        if entered is None:
            entered = self._enter_anew(scale, given, tensors, standing, may_stand)
        for slot, value in zip(self.slots, entered, strict=True):
            values[slot] = value

    def _enter_anew(
        self,
        scale: Scale | None,
        given: tuple[Tensor, ...],
        tensors: tuple[Tensor, ...],
        standing: _Standing | None,
        may_stand: bool,
    ) -> tuple[Tensor, ...]:
        could_stand = {*map(type, tensors)} <= PLAIN and all(map(_is_leaf, tensors))
        if could_stand and standing is None:
            _let_go_of_all()
        if could_stand and (standing is None or not standing.takes_more(scale)):
            standing = self._standing = _Standing(scale, given, tensors)
        if standing is not None and could_stand and may_stand:
            entered = standing.enter(tensors, self.owners, self.fresh)
        else:
            entered = enter(Call(scale, self.owners, self.fresh, _nothing), given, tensors)
        if self.is_awaited:
            runs_when_ready(entered[0].grad_fn)
        return entered

    def let_go(self) -> None:
        if self._standing is not None:
            self._standing.let_go()


_all: weakref.WeakKeyDictionary[Entrance, None] = weakref.WeakKeyDictionary()
_streams: dict[torch.device, frozenset[torch.Stream]] = {}


def follow_streams(devices: Iterable[torch.device]) -> None:
    """Let go of all that stands if one of these devices is given work on another stream."""
    for device in devices:
        streams = current_streams([device])
        if _streams.get(device) != streams:
            _streams[device] = streams
            _let_go_of_all()


def _let_go_of_all() -> None:
    for entrance in living(_all.keyrefs()):
        entrance.let_go()


def _nothing() -> None:
    pass


class _Standing:
    """What has entered for the same parameters in several calls, under one scale."""

    __slots__ = (
        *("_entered", "_free", "_given", "_ids", "_memory", "_numbers", "_scale", "_shapes"),
        "_together",
    )

    def __init__(self, scale: Scale | None, given: tuple[Tensor, ...], tensors: tuple[Tensor, ...]):
        self._scale = scale
        self._ids = [*map(id, given), *map(id, tensors)]
        self._memory = [*map(Tensor.data_ptr, tensors)]
        self._shapes = [*map(_shape, tensors)]
        self._given = given  # what enters keeps the `tensors` alive
        self._numbers = count()
        self._entered: dict[int, tuple[Tensor, ...]] = {}
        # Of which no call makes use. Threads put into it and take out of it.
        self._free: set[int] = set()
        self._together: Tensor | None = None

    def is_for(self, given: Sequence[Tensor], tensors: Sequence[Tensor]) -> bool:
        """Whether the same would enter for these. Parameters that were moved or resized
        (`p.data = x`) are the same objects."""
        return (
            [*map(id, given), *map(id, tensors)] == self._ids
            and [*map(Tensor.data_ptr, tensors)] == self._memory
            and [*map(_shape, tensors)] == self._shapes
        )

    def take(self, scale: Scale | None) -> tuple[Tensor, ...] | None:
        """What entered in a call and is free; another one makes use of it from now on."""
        entered, free = self._entered, self._free  # in this order: it may be let go of meanwhile
        try:
            return entered[free.pop()] if scale == self._scale else None
        except KeyError:
            return None

    def takes_more(self, scale: Scale | None) -> bool:
        return scale == self._scale and bool(self._given) and len(self._entered) < CALLS

    def enter(
        self, tensors: tuple[Tensor, ...], owners: tuple[int, ...], fresh: frozenset[int]
    ) -> tuple[Tensor, ...]:
        """For one more call. The first of several that begin at once is that for all later ones."""
        number = next(self._numbers)
        call = Call(self._scale, owners, fresh, have_gone=partial(self._free.add, number))
        if self._together is None:
            entered, self._together = enter_first(call, self._given, tensors)
        else:
            entered = enter_later(call, self._given, tensors, self._together)
        self._entered[number] = entered
        return entered

    def let_go(self) -> None:
        self._given, self._entered, self._free, self._together = (), {}, set(), None


def grouped(
    slots: Sequence[tuple[int, int]], args: Sequence[Tensor], fresh: Container[int]
) -> Iterator[Entrance]:
    """An entrance for each group of parameters. `slots`: of each, its position among `args` and
    where a value for it goes. `fresh`: positions of those whose first gradient is for them alone.
    """
    members: list[tuple[int, int]] = []
    size, are_first = 0, True
    for position, its_slots in groupby(reversed(slots), key=itemgetter(0)):
        parameter = args[position]
        is_full = size >= _group_bytes(parameter.device, are_first)
        if members and (is_full or not _may_join(parameter, args[members[0][0]])):
            yield _entrance(members, args, fresh)
            members, size, are_first = [], 0, False
        members += its_slots
        size += parameter.nbytes
    if members:
        yield _entrance(members, args, fresh)


def _group_bytes(device: torch.device, is_first: bool) -> int:
    if device.type == "cpu":
        return CPU_GROUP_BYTES
    if has_process_group():
        return FIRST_BYTES_SENT if is_first else BYTES_SENT
    return GROUP_BYTES


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
    _all[entrance] = None
    return entrance


def picker(positions: Sequence[int]) -> Pick:
    """What takes these out of a sequence, in C: it does so at every call of a model."""
    if len(positions) > 1:
        return itemgetter(*positions)
    if not positions:
        return lambda values: ()
    (only,) = positions
    return lambda values: (values[only],)
