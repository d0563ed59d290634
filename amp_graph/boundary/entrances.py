"""Entrances: parameters enter a graph in groups whose gradients go out together.

An alias of each parameter enters, or of its low-precision weight, with one autograd node behind the
aliases of a group. They stand for the next call (`standing`) until a call brings other parameters,
or parameters that are not as they were.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from amp_graph.boundary.entering import Call, enter
from amp_graph.boundary.scale import Scale
from amp_graph.boundary.standing import StandingAliases, follow_streams, let_go_of_all
from amp_graph.gradients.engine import CAN_RUN_WHEN_READY, has_process_group, runs_when_ready
from amp_graph.weights.low_precision_weight import is_plain
from amp_graph.weights.picker import Pick, picker
from amp_graph.weights.store import GraphWeights

# Bytes of float32 parameters per group, the last parameters first. The first group is small: losses
# are balanced by the gradients of a model's last layer alone (VQGAN), which are asked for by
# themselves, and in DistributedDataParallel communication can start when it is done. Then few are
# faster where each is launched, or looked at for overflow, but among several processes they are of
# the size that it sends. On a CPU all are small: what one was widened from is memory for the next.
SMALL_BYTES, GROUP_BYTES, BYTES_SENT = 2**20, 64 * 2**20, 25 * 2**20

_requires_grad = attrgetter("requires_grad")
_hooks, _hooks_after = map(attrgetter, ("_backward_hooks", "_post_accumulate_grad_hooks"))


@dataclass(eq=False)
class Entrance:
    """A group of parameters of one device and dtype, whose gradients leave together.

    device: the device that they are on.
    slots: where their values, in float32 or low precision, go among the graph's inputs.
    owners: for each slot, which of the parameters it is for, counted within the group.
    fresh: the owners whose first gradient is made for them alone.
    is_awaited: whether their gradients leave as soon as they are there, for what happens to them
        during the backward pass, or for their memory. On CPU, where nothing is done meanwhile, it
        is a little faster if all leave at the end.
    may_stand: whether the aliases may stand for the next call.
    """

    device: torch.device
    slots: tuple[int, ...]
    owners: tuple[int, ...]
    fresh: frozenset[int]
    is_awaited: bool
    may_stand: bool
    pick_values: Pick
    pick_tensors: Pick
    _standing: StandingAliases | None = field(default=None, init=False)

    def enter(self, scale: Scale | None, values: list[Any], args: Sequence[Any]) -> None:
        entered = None if self._standing is None else self._standing.take(scale)
        if entered is None:
            given, tensors = self.pick_values(values), self.pick_tensors(args)
            entered = self._enter_anew(scale, given, tensors)
        for slot, value in zip(self.slots, entered, strict=True):
            values[slot] = value

    def _enter_anew(
        self, scale: Scale | None, given: Sequence[Tensor], tensors: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        standing = self._standing
        if not self.may_stand:
            entered = enter(Call(scale, self.owners, self.fresh, _nothing), given, tensors)
        else:
            if standing is None or not standing.takes_more(scale):
                standing = self._standing = StandingAliases(scale)
            entered = standing.enter(given, tensors, self.owners, self.fresh)
        if self.is_awaited:
            runs_when_ready(entered[0].grad_fn)
        return entered


def _nothing() -> None:
    pass


class Entrances:
    """The entrances of all parameters of one graph, for as long as these are as they were.

    weights: the graph's weights, which tell that its parameters are the same; `parameters`: those.
    slots: for each value that may enter for a parameter, the parameter's position among `args`, the
        captured inputs, and where the value goes: in its own place, or as a low-precision weight.
    fresh: positions of the parameters whose first gradient is for them alone.
    is_scaled: whether gradients are scaled.
    """

    def __init__(
        self,
        weights: GraphWeights,
        parameters: Sequence[Tensor],
        slots: Iterable[tuple[int, int]],
        args: Sequence[Tensor],
        fresh: frozenset[int],
        is_scaled: bool,
    ):
        self._weights, self._is_scaled = weights, is_scaled
        self._traits = _traits(parameters)
        needed = sorted((i, slot) for i, slot in slots if args[i].requires_grad)
        wide = [i for i, slot in needed if i == slot]
        self.pick_wide = picker(wide)
        self._groups = tuple(_grouped(needed, args, fresh.intersection(wide), is_scaled))
        devices = {group.device for group in self._groups}
        self._devices = {device for device in devices if device.type != "cpu"}  # it has no streams
        if any(_has_own_node(args[i]) for i, _ in needed):
            let_go_of_all()

    def are_for(self, weights: GraphWeights, parameters: Sequence[Tensor], is_scaled: bool) -> bool:
        """Whether these parameters, which are those of the weights, would enter likewise."""
        return (
            weights is self._weights
            and is_scaled is self._is_scaled
            and _traits(parameters) == self._traits
        )

    def enter(self, scale: Scale | None, values: list[Any], args: Sequence[Any]) -> None:
        """Replace the values for parameters by aliases, out of which gradients go to the
        parameters, in their dtype, divided by S."""
        follow_streams(self._devices)
        for group in self._groups:
            group.enter(scale, values, args)


def _traits(parameters: Sequence[Tensor]) -> list[list[bool]]:
    """Return the features of parameters that groups follow from, apart from devices, dtypes and
    sizes."""
    return [
        [*map(_requires_grad, parameters)],
        [*map(bool, map(_hooks, parameters))],
        [*map(bool, map(_hooks_after, parameters))],
    ]


def _grouped(
    slots: Sequence[tuple[int, int]], args: Sequence[Tensor], fresh: Container[int], is_scaled: bool
) -> Iterator[Entrance]:
    """Yield an entrance for each group of parameters."""
    members: list[tuple[int, int]] = []
    size, most = 0, SMALL_BYTES
    for position, its_slots in groupby(reversed(slots), key=itemgetter(0)):
        parameter = args[position]
        if members and (size >= most or not _may_join(parameter, args[members[0][0]])):
            yield _entrance(members, args, fresh)
            members, size, most = [], 0, _group_bytes(parameter.device, is_scaled)
        members += its_slots
        size += parameter.nbytes
    if members:
        yield _entrance(members, args, fresh)


def _group_bytes(device: torch.device, is_scaled: bool) -> int:
    if device.type == "cpu" and not is_scaled:
        return SMALL_BYTES
    return BYTES_SENT if has_process_group() else GROUP_BYTES


def _may_join(one: Tensor, other: Tensor) -> bool:
    """Whether two parameters may be in one group. Those with hooks leave alone: the hooks of a
    parameter that the loss does not depend on would be called with None for those of its group."""
    are_alike = one.device == other.device and one.dtype == other.dtype
    return are_alike and not (_has_hooks(one) or _has_hooks(other))


def _has_own_node(parameter: Tensor) -> bool:
    """Whether gradients end at it, in a node that is for the memory and shape it has."""
    return is_plain(parameter) and parameter.is_leaf


def _has_hooks(parameter: Tensor) -> bool:
    return bool(_hooks(parameter) or _hooks_after(parameter))


def _entrance(
    members: Sequence[tuple[int, int]], args: Sequence[Tensor], fresh: Container[int]
) -> Entrance:
    positions = sorted({position for position, _ in members})
    owners = {position: k for k, position in enumerate(positions)}
    slots = tuple(slot for _, slot in sorted(members))  # of one parameter, float32 comes first
    first = args[positions[0]]
    could_stand = all(_has_own_node(args[position]) for position in positions)
    is_heard = _has_hooks(first) or has_process_group()
    return Entrance(
        first.device,
        slots,
        owners=tuple(owners[position] for position, _ in sorted(members)),
        fresh=frozenset(k for k, position in enumerate(positions) if position in fresh),
        is_awaited=is_heard or first.device.type != "cpu",
        may_stand=could_stand and (CAN_RUN_WHEN_READY or not is_heard),
        pick_values=picker(slots),
        pick_tensors=picker(positions),
    )
