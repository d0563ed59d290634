"""Low-precision weights: the copies of float32 parameters that emitted graphs compute with.

They live as long as the conversion and are brought up to date whenever a graph is about to run,
all of a graph's in one fused call. No cheaper rule is always right: writes through `.data` change a
parameter without a trace (its `_version` stays, seen in torch 2.13), so a copy that was kept could
be stale. Who knows that nothing does such things to a model may ask for copies that are kept
until a trace of a change is seen (`Policy.refresh_weights`).

All of this runs at every call of a model, so nearly all work per parameter is done in C.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from amp_graph.gradients.engine import copy_all_
from amp_graph.gradients.memory import address, addresses
from amp_graph.graphs.aten import SET_GRAD_ENABLED
from amp_graph.weak_references import are_still, living
from amp_graph.weights.change_tracker import ChangeTracker
from amp_graph.weights.low_precision_weight import Key, LowPrecisionWeight, is_plain, memory_for
from amp_graph.weights.pending_calls import PendingCalls
from amp_graph.weights.picker import picker

_version, _shape = attrgetter("_version"), attrgetter("shape")


class LowPrecisionWeights:
    """The low-precision weights of one model's parameters, shared by all its graphs.

    on_change: whether they are written anew only where a parameter may have changed.
    choosing: held by the one of several threads that looks for the weights of a graph, or makes
        them.
    pending: the calls that were computed with them and may go on to a backward pass.
    """

    def __init__(self, on_change: bool = False) -> None:
        self.on_change = on_change
        self.choosing = threading.Lock()
        self.pending = PendingCalls()
        self._weights: dict[Key, LowPrecisionWeight] = {}

    def of(
        self, parameters: Sequence[Tensor], dtypes: Sequence[torch.dtype]
    ) -> list[LowPrecisionWeight]:
        """Return the weight of each parameter in its dtype. A new one is made if there is none that
        fits, or if the one there is was made of other memory and a backward pass may still need it
        as it is."""
        keys = [(id(p), dtype) for p, dtype in zip(parameters, dtypes, strict=True)]
        now = dict(zip(keys, map(_address, parameters), strict=True))
        weights = self._weights  # and not itself: what a weight refers to is kept by it
        missing = {
            key: parameter
            for key, parameter in zip(keys, parameters, strict=True)
            if key not in weights
            or not weights[key].fits(parameter)
            or (self.pending and weights[key].address != now[key])
        }
        with torch.inference_mode(False):
            for key, low in memory_for(missing).items():
                weights[key] = LowPrecisionWeight(missing[key], low, _forgetting(weights, key))
        for key in keys:
            weights[key].address = now[key]
        return [weights[key] for key in keys]


def _forgetting(weights: dict[Key, LowPrecisionWeight], key: Key) -> Callable[[Any], object]:
    return lambda _: weights.pop(key, None)


def _address(parameter: Tensor) -> int:
    return address(parameter) if is_plain(parameter) else 0


class GraphWeights:
    """The low-precision weights that one graph computes with, valid while its parameters are the
    same.

    parameters: those of the graph. As many of the first as there are `dtypes` have a weight, each
        in its dtype; the others have none.
    """

    def __init__(
        self,
        store: LowPrecisionWeights,
        dtypes: Sequence[torch.dtype],
        parameters: Sequence[Tensor],
    ):
        copied = parameters[: len(dtypes)]
        weights = store.of(copied, dtypes)
        first = {id(weight): k for k, weight in reversed([*enumerate(weights)])}
        # Else a weight stands further in front, and is written.
        self._are_first = [first[id(weight)] == k for k, weight in enumerate(weights)]
        self._written = [weight.written for weight in compress(weights, self._are_first)]
        self._lows = [weight.low for weight in weights]
        self._unrecorded = [weight.unrecorded for weight in weights]
        self._weights = weights
        self._ids = frozenset(map(id, weights))
        self._pending = store.pending
        self._parameters = [*map(weakref.ref, parameters)]
        self._shapes = [*map(_shape, parameters)]
        self._pick_plain = picker([i for i, p in enumerate(parameters) if is_plain(p)])
        self._addresses = addresses(self._pick_plain(parameters))
        self._versions: list[int] = []
        is_tracked = store.on_change and all(map(_leaves_traces, copied))
        self._tracker = ChangeTracker() if is_tracked else None

    def are_of(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these are the parameters: the same objects, of the same shapes, in the same
        memory (`p.data = x`). A graph is for one device, and for strides that follow from the
        shapes."""
        return (
            are_still(self._parameters, parameters)
            and [*map(_shape, parameters)] == self._shapes
            and addresses(self._pick_plain(parameters)) == self._addresses
        )

    def refreshed(self, parameters: Sequence[Tensor], recorded: bool) -> list[Tensor]:
        """Return each parameter in its dtype, as of now, for a call that autograd records or not.

        Unless weights are kept, one is written anew even if nothing is known to have changed. Its
        version counts up only if the parameter's did, so that autograd objects to a backward pass
        through weights that were stepped meanwhile exactly where it would object in float32.
        """
        if not self._weights:
            return []
        parameters = [*parameters[: len(self._weights)]]
        try:
            versions = [*map(_version, parameters)]
        except RuntimeError:  # Inference tensors count no versions, nor does autograd record them.
            versions = [0 if p.is_inference() else p._version for p in parameters]
        if versions != self._versions:
            changed = zip(self._weights, versions, strict=True)
            increment_version([weight.low for weight, version in changed if weight.follow(version)])
            self._versions = versions
        if self._tracker is None:
            self._write(parameters)
        else:
            self._write_if_stale(self._tracker, parameters, versions)
        if self._pending and not torch.is_grad_enabled():
            self._pending.were_overwritten(self._ids)
        return self._lows if recorded else self._unrecorded

    def await_backward(self, results: Sequence[Any]) -> None:
        """Take note that a recorded call has returned these results, from which gradients may
        come."""
        if self._weights:
            self._pending.add(results, self._ids, self._write_again)

    def _write_again(self) -> None:
        parameters = living(self._parameters[: len(self._weights)])
        if len(parameters) == len(self._weights):
            self._write(parameters)

    def _write(self, parameters: list[Tensor]) -> None:
        if len(self._written) < len(parameters):
            parameters = [*compress(parameters, self._are_first)]
        records = torch.is_grad_enabled()
        SET_GRAD_ENABLED(False)  # as `no_grad` does, in a dozen calls of Python
        try:
            copy_all_(self._written, parameters)
        finally:
            SET_GRAD_ENABLED(records)

    def _write_if_stale(
        self, tracker: ChangeTracker, parameters: list[Tensor], versions: Sequence[int]
    ) -> None:
        """Write the weights if a parameter may have changed since this graph last did, or another
        graph wrote them since, perhaps from other memory that was a parameter's meanwhile."""
        seen = tracker.look(parameters, versions)
        if not tracker.are_new(seen) and all(weight.writer is tracker for weight in self._weights):
            return
        self._write(parameters)
        tracker.keep(seen, parameters)
        for weight in self._weights:
            weight.writer = tracker


def _leaves_traces(parameter: Tensor) -> bool:
    """Whether a write to a parameter leaves a trace: not to an inference tensor, which has no
    version, nor to a subclass with memory of its own."""
    return is_plain(parameter) and not parameter.is_inference()
