"""Recorded calls whose backward pass is yet to come, and whose copies another call may overwrite.

Between a forward and its backward pass a script may put other weights into a model through `.data`
(the average that a teacher is), call it without gradients, and put the old ones back: autograd,
whose saved weights are the parameters' own memory, computes the same gradients as without. Copies
hold what the teacher's call wrote. They are written anew when gradients come in.

Parameters that were given other memory meanwhile (`p.data = x`) get other copies, see
`LowPrecisionWeights.of`: autograd keeps the memory that a call has read. Not seen are values put
into the same memory around a call that autograd records, as it records any two in one step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from amp_graph.gradients.engine import call_before, keeps_graph
from amp_graph.uncaptured import never_captured
from amp_graph.weak_references import living


class PendingCalls:
    """The pending calls of one model."""

    def __init__(self) -> None:
        self._all: set[weakref.ref[_PendingCall]] = set()

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(
        self, results: Iterable[Any], copies: frozenset[int], write: Callable[[], object]
    ) -> None:
        """Add a call. `copies`: the ids of the weights that it computes with; `write`: writes
        them."""
        nodes = {r.grad_fn for r in results if isinstance(r, Tensor)}
        nodes.discard(None)
        if not nodes:
            return
        call = _PendingCall(len(nodes), copies, write, self._all)
        self._all.add(weakref.ref(call, self._all.discard))
        for node in nodes:
            call_before(node, call)

    def were_overwritten(self, copies: frozenset[int]) -> None:
        for call in living([*self._all]):
            call.is_overwritten |= not call.copies.isdisjoint(copies)


class _PendingCall:
    """A pending call. The autograd nodes of its results keep it alive, and call it before
    they run."""

    __slots__ = ("__weakref__", "_all", "_awaited", "_write", "copies", "is_overwritten")

    def __init__(
        self,
        awaited: int,
        copies: frozenset[int],
        write: Callable[[], object],
        all_pending: set[weakref.ref[_PendingCall]],
    ):
        self.copies, self._write = copies, write
        self.is_overwritten = False
        self._awaited, self._all = awaited, all_pending

    @never_captured(reason="the boundary of a graph of amp_graph")
    def __call__(self, _: Any) -> None:
        if self.is_overwritten:
            self.is_overwritten = False
            self._write()
        if not keeps_graph():
            self._awaited -= 1
            if self._awaited == 0:
                self._all.discard(weakref.ref(self))
