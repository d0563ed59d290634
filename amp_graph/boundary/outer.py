"""The boundary of an emitted graph: where values go in and out, and gradients out and in.

    x, w ----> enter -----> emitted graph ----> leave ----> y        values
    dx, dw <-- unscale <--- backward <--------- scale <---- dy       gradients

Values cross as they are; a float32 parameter may enter as its low-precision weight. Gradients are
multiplied by the loss scale S where they come in and divided by it where they go out, so that every
gradient outside of a graph is true: `param.grad`, what `torch.autograd.grad` returns, what hooks
see. Parameters enter in groups; the gradients of a group come out of one autograd node, which
widens them in one fused call, and unscales and checks them in another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from amp_graph.boundary.aliases import enter_inputs, leave_results, record_writes
from amp_graph.boundary.crossing import carries_none, follow, leave_wide_
from amp_graph.boundary.early import EarlyResults
from amp_graph.boundary.entrances import Entrances
from amp_graph.boundary.scale import ModelScale, Scale
from amp_graph.weights.picker import Pick, picker
from amp_graph.weights.store import GraphWeights, LowPrecisionWeights

_AS_IT_IS = nullcontext()
_requires_grad = attrgetter("requires_grad")


@dataclass(frozen=True)
class Interface:
    """The inputs and results of a graph, by position among its captured inputs and its results.

    weights: for each low-precision weight, which the graph takes after those inputs, the position
        of its parameter and its dtype.
    parameters: the inputs that are parameters and read in float32 as well, each with whether its
        gradient from there is made for it alone.
    written: the inputs that the graph may write to.
    widened: the results that are to be float32 and that the graph leaves low.
    early: the keys of the results that leave the graph where they are made; if there are any, the
        graph takes an `EarlyResults` as its last input.
    records: whether autograd records anything of the graph, as it was captured.
    ends_recording: whether autograd records after it; None if the graph does not change that.
    """

    weights: Sequence[tuple[int, torch.dtype]] = ()
    parameters: Mapping[int, bool] = field(default_factory=dict)
    written: Collection[int] = ()
    widened: frozenset[int] = frozenset()
    early: Mapping[int, int] = field(default_factory=dict)
    records: bool = False
    ends_recording: bool | None = None


class Boundary:
    """Calls an emitted graph with its low-precision weights, and scales its gradients.

    run: the graph, which has this `interface`.
    watched: runs it under a FirstNonfinite, which it takes first.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        interface: Interface,
        store: LowPrecisionWeights,
        scale: ModelScale | None,
        watched: Callable[..., Any] | None = None,
    ):
        self._run = run
        self._interface = interface
        self._store = store
        self._scale = scale
        self._watched = watched
        weights, parameters = interface.weights, interface.parameters
        self._dtypes = [dtype for _, dtype in weights]
        self._low = [position for position, _ in weights]
        self._wide = parameters if scale is not None else {}
        self._fresh = frozenset(i for i, is_fresh in parameters.items() if is_fresh)
        self._pick_parameters = picker([*self._low, *self._wide])
        self._parameters = frozenset([*self._low, *parameters])
        self._others: list[int] | None = None  # the other tensors, once it is known which are
        self._pick_others = picker([])
        self._weights: GraphWeights | None = None
        self._entrances: Entrances | None = None

    def __call__(self, *args: Any) -> Any:
        parameters = self._pick_parameters(args)
        weights = self._weights_of(parameters)
        is_enabled = torch.is_grad_enabled()
        recorded = is_enabled or self._interface.records
        values = [*args, *weights.refreshed(parameters, recorded)]
        if not recorded:
            return self._results(self._run, values)[0]
        if is_enabled and self._interface.ends_recording is None:
            return self._run_recorded(args, parameters, weights, values, _AS_IT_IS)
        with torch.enable_grad():  # what enters and leaves is recorded
            begin = torch.enable_grad() if is_enabled else torch.no_grad()
            result = self._run_recorded(args, parameters, weights, values, begin)
        if self._interface.ends_recording is not None:
            torch.set_grad_enabled(self._interface.ends_recording)
        return result

    def _weights_of(self, parameters: Sequence[Tensor]) -> GraphWeights:
        """Return the weights of these parameters, kept while the parameters are the same: another
        call's may be others. Everything else that is kept for parameters goes by this object."""
        weights = self._weights
        if weights is None or not weights.are_of(parameters):
            with self._store.choosing:
                weights = self._weights
                if weights is None or not weights.are_of(parameters):
                    weights = GraphWeights(self._store, self._dtypes, parameters)
                    self._weights = weights
        return weights

    def _run_recorded(
        self,
        args: Sequence[Any],
        parameters: Sequence[Tensor],
        weights: GraphWeights,
        values: list[Any],
        begin: AbstractContextManager[Any],
    ) -> Any:
        """Run with gradients of parameters going out. The graph itself begins inside of `begin`."""
        scale: Scale | None = None
        inputs: list[int] = []
        if self._scale is not None and self._scale.is_on():
            if self._others is None:
                others = (i for i in range(len(args)) if i not in self._parameters)
                found = [i for i in others if isinstance(args[i], Tensor)]
                self._pick_others = picker(found)
                self._others = found  # last: another thread may look for it
            inputs = [*compress(self._others, map(_requires_grad, self._pick_others(args)))]
            scale = self._scale.for_call([*map(args.__getitem__, inputs)])
        entrances = self._entrances
        is_scaled = scale is not None
        if entrances is None or not entrances.are_for(weights, parameters, is_scaled):
            entrances = self._entrances = self._entrances_for(weights, parameters, args, scale)
        entrances.enter(scale, values, args)
        if scale is not None:
            results = self._run_scaled(scale, args, inputs, values, entrances.pick_wide, begin)
        else:
            with begin:
                results = self._results(self._run, values)[0]
        weights.await_backward(results)
        return results

    def _results(
        self, run: Callable[..., Any], values: Sequence[Any], scale: Scale | None = None
    ) -> tuple[Any, frozenset[int]]:
        """Return the results of a run, and the positions of those that have left the graph by
        now."""
        if not self._interface.early:
            if not self._interface.widened:
                return run(*values), self._interface.widened
            results = [*run(*values)]
            leave_wide_(scale, results, self._interface.widened)
            return results, self._interface.widened
        early = EarlyResults(scale)
        results = [*run(*values, early)]
        left = {i: early.left[key] for i, key in self._interface.early.items() if key in early.left}
        for i, result in left.items():
            results[i] = result
        leave_wide_(scale, results, self._interface.widened.difference(left))
        return results, self._interface.widened.union(left)

    def _run_scaled(
        self,
        scale: Scale,
        args: Sequence[Any],
        inputs: Sequence[int],
        values: list[Any],
        pick_wide: Pick,
        begin: AbstractContextManager[Any],
    ) -> Any:
        """Run with gradients of inputs and outputs scaled too."""
        given: list[Tensor] = []
        entered: list[Tensor] = []
        if inputs:
            given = [*map(args.__getitem__, inputs)]
            entered = enter_inputs(scale, given, [i in self._interface.written for i in inputs])
            versions = [value._version for value in entered]
            for i, value in zip(inputs, entered, strict=True):
                values[i] = value
        constants = [*filter(carries_none, map(args.__getitem__, self._interface.written))]
        with begin:
            run = self._run
            if scale.watch is not None and self._watched is not None:
                run = partial(self._watched, scale.watch)
            results, left = self._results(run, values, scale)
        if inputs:
            written = [k for k, value in enumerate(entered) if value._version != versions[k]]
            record_writes(scale, [given[k] for k in written], [entered[k] for k in written])
            for x, value in zip(given, entered, strict=True):
                follow(x, value)
        if len(left) == len(results) and not constants:
            return results
        given, entered = [*given, *pick_wide(args)], [*entered, *pick_wide(values)]
        return leave_results(scale, results, given, entered, constants, left)

    def _entrances_for(
        self,
        weights: GraphWeights,
        parameters: Sequence[Tensor],
        args: Sequence[Any],
        scale: Scale | None,
    ) -> Entrances:
        slots = [(i, len(args) + k) for k, i in enumerate(self._low)]
        if scale is not None:
            slots += [(i, i) for i in self._wide]
            scale.note_parameters(parameters)
        return Entrances(weights, parameters, slots, args, self._fresh, scale is not None)
