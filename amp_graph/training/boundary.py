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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amp_graph.training.crossing import Scale, carries_gradient, enter, leave, write_back
from amp_graph.training.weights import LowPrecisionWeights

# Bytes of float32 parameters per group, the last parameters first: as in DistributedDataParallel,
# whose communication can start when the first, small group is done. On CPU all groups are small,
# so that gradients are still in the cache when they are widened.
FIRST_GROUP_BYTES, GROUP_BYTES = 2**20, {"cpu": 2**20, "other": 25 * 2**20}


class Boundary:
    """Calls an emitted graph with its low-precision weights, and scales its gradients.

    run: the graph; it takes the captured inputs and then the low-precision weights.
    watched: runs the graph under a FirstNonfinite, which it takes first.
    weights: position among the captured inputs and dtype of each low-precision weight.
    parameters: positions of the inputs that are parameters and read in float32 as well.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        store: LowPrecisionWeights,
        scale: Scale | None,
        weights: Sequence[tuple[int, torch.dtype]] = (),
        parameters: Sequence[int] = (),
        watched: Callable[..., Any] | None = None,
    ):
        self._run = run
        self._watched = watched
        self._store = store
        self._scale = scale
        self._positions = [position for position, _ in weights]
        self._dtypes = [dtype for _, dtype in weights]
        self._read_wide = list(parameters)
        self._groups: tuple[_Group, ...] = ()
        self._groups_for: Any = None  # ids and requires_grad of the parameters they were made for

    def __call__(self, *args: Any) -> Any:
        values = list(args)
        if self._positions:
            parameters = [args[i] for i in self._positions]
            values += self._store.refreshed(parameters, self._dtypes)
        if not torch.is_grad_enabled():
            return self._run(*values)
        scale = self._scale if self._scale is not None and self._scale.is_on() else None
        for group in self._groups_of(args, scale):
            entered = enter(
                scale,
                [values[slot] for slot in group.slots],
                group.owners,
                [args[i] for i in group.positions],
            )
            for slot, value in zip(group.slots, entered, strict=True):
                values[slot] = value
        if scale is None:
            return self._run(*values)
        return self._run_scaled(scale, args, values)

    def _run_scaled(self, scale: Scale, args: Sequence[Any], values: list[Any]) -> Any:
        """Run with gradients of inputs and outputs scaled too."""
        inputs = [
            i
            for i, value in enumerate(args)
            if values[i] is value and i not in self._positions and carries_gradient(value)
        ]
        for i in inputs:
            (values[i],) = enter(scale, [args[i]], (0,), [args[i]])
        versions = [args[i]._version for i in inputs]
        if scale.watch is not None and self._watched is not None:
            results = self._watched(scale.watch, *values)
        else:
            results = self._run(*values)
        for i, version in zip(inputs, versions, strict=True):
            if args[i]._version != version:
                write_back(scale, args[i], values[i])
        return leave(scale, results, [args[i] for i in inputs])

    def _groups_of(self, args: Sequence[Any], scale: Scale | None) -> tuple[_Group, ...]:
        """The parameters that need gradients, in groups; the answer is kept while it holds."""
        lows = [(id(args[i]), args[i].requires_grad) for i in self._positions]
        wides = [(id(args[i]), args[i].requires_grad) for i in self._read_wide] if scale else []
        if self._groups_for != (lows, wides):
            slots = [(i, len(args) + k) for k, i in enumerate(self._positions)]
            if scale is not None:
                slots += [(i, i) for i in self._read_wide]
            slots = sorted((i, slot) for i, slot in slots if args[i].requires_grad)
            self._groups = tuple(_grouped(slots, args))
            self._groups_for = (lows, wides)
            if scale is not None:
                scale.parameters_changed()
        return self._groups


@dataclass(frozen=True)
class _Group:
    """Parameters whose gradients leave together.

    positions: where they are among the captured inputs.
    slots: where their values, in float32 or low precision, go among the graph's inputs.
    owners: for each slot, the index into `positions` of its parameter.
    """

    positions: tuple[int, ...]
    slots: tuple[int, ...]
    owners: tuple[int, ...]


def _grouped(slots: Sequence[tuple[int, int]], args: Sequence[Tensor]) -> Iterator[_Group]:
    positions: list[int] = []
    members: list[tuple[int, int]] = []
    size, limit = 0, FIRST_GROUP_BYTES
    for position, slot in reversed(slots):
        if position not in positions:
            if size >= limit:
                yield _group(positions, members)
                kind = args[position].device.type
                limit = GROUP_BYTES.get(kind, GROUP_BYTES["other"])
                positions, members, size = [], [], 0
            positions.append(position)
            size += args[position].nbytes
        members.append((position, slot))
    if positions:
        yield _group(positions, members)


def _group(positions: list[int], members: list[tuple[int, int]]) -> _Group:
    owners = tuple(positions.index(position) for position, _ in members)
    return _Group(tuple(positions), tuple(slot for _, slot in members), owners)
