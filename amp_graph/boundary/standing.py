"""Aliases that have entered a graph and stand for its next calls.

Once gradients have gone out of the aliases of a group nothing of the call remains in them, and they
stand for the next one. A call that comes before that, as the second of two whose losses are added,
gets aliases of its own, which stand likewise: gradients of several calls meet in float32, not in
low precision.

Standing aliases keep the AccumulateGrad nodes of their parameters alive. Such a node is for the
shape that its parameter had when it was made, and for the stream that it was made on: a step
captured as a CUDA graph on another stream could not use it. So all standing aliases, of all models,
are dropped when a call brings parameters of another shape, or comes on another stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import count

import torch
from torch import Tensor

from amp_graph.boundary.entering import Call, enter_first, enter_later
from amp_graph.boundary.scale import Scale
from amp_graph.gradients.engine import current_streams
from amp_graph.weak_references import living

CALLS = 64  # whose aliases stand, those that no backward pass came for among them


class StandingAliases:
    """The aliases of the same parameters that entered in several calls, under one scale."""

    __slots__ = ("__weakref__", "_entered", "_free", "_is_over", "_numbers", "_scale", "_together")

    def __init__(self, scale: Scale | None):
        self._scale = scale
        self._is_over = False
        self._numbers = count()
        self._entered: dict[int, tuple[Tensor, ...]] = {}
        # The numbers that no call makes use of. Threads put into it and take out of it.
        self._free: set[int] = set()
        self._together: Tensor | None = None
        _all[self] = None

    def take(self, scale: Scale | None) -> tuple[Tensor, ...] | None:
        """Return aliases of a call that are free, for another call to use from now on; None if
        there are none."""
        entered, free = self._entered, self._free  # in this order: it may be let go of meanwhile
        try:
            return entered[free.pop()] if scale == self._scale else None
        except KeyError:
            return None

    def takes_more(self, scale: Scale | None) -> bool:
        return scale == self._scale and not self._is_over and len(self._entered) < CALLS

    def enter(
        self,
        values: Sequence[Tensor],
        tensors: Sequence[Tensor],
        owners: tuple[int, ...],
        fresh: frozenset[int],
    ) -> tuple[Tensor, ...]:
        """Make aliases for one more call. The first of several calls that begin at once serves all
        later ones."""
        number = next(self._numbers)
        call = Call(self._scale, owners, fresh, have_gone=partial(self._free.add, number))
        together = self._together  # it may be let go of meanwhile
        if together is None:
            entered, self._together = enter_first(call, values, tensors)
        else:
            entered = enter_later(call, values, tensors, together)
        self._entered[number] = entered
        return entered

    def let_go(self) -> None:
        self._is_over = True
        self._entered, self._free, self._together = {}, set(), None


_all: weakref.WeakKeyDictionary[StandingAliases, None] = weakref.WeakKeyDictionary()
_streams: dict[torch.device, frozenset[torch.Stream]] = {}


def follow_streams(devices: Iterable[torch.device]) -> None:
    """Let go of all that stands if one of these devices is given work on another stream."""
    for device in devices:
        streams = current_streams([device])
        if _streams.get(device) != streams:
            _streams[device] = streams
            let_go_of_all()


def let_go_of_all() -> None:
    for standing in living(_all.keyrefs()):
        standing.let_go()
