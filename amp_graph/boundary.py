"""The boundary of an emitted graph: where values go in and out, and gradients out and in.

    x, w ----> enter -----> emitted graph ----> leave ----> y        values
    dx, dw <-- unscale <--- backward <--------- scale <---- dy       gradients

Values cross as they are; a float32 parameter may enter as its low-precision weight. Gradients are
multiplied by the loss scale S where they come in and by 1/S where they go out, so that every
gradient outside of a graph is true: `param.grad`, what `torch.autograd.grad` returns, what hooks
see. Parameters enter in groups; the gradients of a group come out of one autograd node, which
widens and unscales them in two fused calls.

Second derivatives. A gradient penalty sends gradients through the backward pass, which is a graph
like any other: what left it, divided by S, is where they come in. So a crossing in either direction
is a multiplication by some factor, and its derivative crosses the other way, with the same factor
(that is transposition) times S coming in, or times 1/S going out. The factors alternate: 1, 1/S, 1
... for what enters, 1, S, 1 ... for what leaves; inside, gradients of any order are S times the
true ones. `torch.amp.GradScaler`'s recipe for gradient penalties has the same factors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from amp_graph.nonfinite import FirstNonfinite
from amp_graph.weights import LowPrecisionWeights

# Bytes of float32 parameters per group, the last parameters first: as in DistributedDataParallel,
# whose communication can start when the first, small group is done.
FIRST_GROUP_BYTES, GROUP_BYTES = 2**20, 25 * 2**20


class Scale(Protocol):
    """What a boundary asks of a loss scale."""

    def is_on(self) -> bool:
        """Whether gradients are scaled in graphs that run from now on."""

    def factor(self, device: torch.device) -> Tensor:
        """S, 0-dimensional, float32."""

    def inverse(self, device: torch.device) -> Tensor:
        """1/S, 0-dimensional, float32."""

    @property
    def watch(self) -> FirstNonfinite | None:
        """Set while graphs are to look for values that are not finite."""

    def entered(self, parameters: Iterable[Tensor]) -> None:
        """Called with the parameters whose gradients are scaled, when they change."""


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
            entered = _apply(
                _Enter,
                scale,
                [values[slot] for slot in group.slots],
                group.owners,
                *[args[i] for i in group.positions],
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
            if values[i] is value and i not in self._positions and _carries_gradient(value)
        ]
        for i in inputs:
            (values[i],) = _apply(_Enter, scale, [args[i]], (0,), args[i])
        versions = [args[i]._version for i in inputs]
        if scale.watch is not None and self._watched is not None:
            results = self._watched(scale.watch, *values)
        else:
            results = self._run(*values)
        for i, version in zip(inputs, versions, strict=True):
            if args[i]._version != version:
                _apply(_WriteBack, scale, args[i], values[i])
        return _left(scale, results, [args[i] for i in inputs])

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
                scale.entered(args[i] for i, _ in slots)
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
                positions, members, size, limit = [], [], 0, GROUP_BYTES
            positions.append(position)
            size += args[position].nbytes
        members.append((position, slot))
    if positions:
        yield _group(positions, members)


def _group(positions: list[int], members: list[tuple[int, int]]) -> _Group:
    owners = tuple(positions.index(position) for position, _ in members)
    return _Group(tuple(positions), tuple(slot for _, slot in members), owners)


class _Enter(Function):
    """Give values in for tensors: `owners` says which tensor each value stands for."""

    @staticmethod
    def forward(
        ctx: Any,
        scale: Scale | None,
        values: Sequence[Tensor],
        owners: Sequence[int],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.owners, ctx.tensors = scale, owners, tensors
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        pairs = [(i, g) for i, g in zip(ctx.owners, grads, strict=True) if g is not None]
        out: list[Tensor | None] = [None] * len(ctx.tensors)
        fused = not torch.is_grad_enabled() and len({i for i, _ in pairs}) == len(pairs)
        if fused and all(_is_plain(g) and ctx.tensors[i].dtype is torch.float32 for i, g in pairs):
            for (i, _), gradient in zip(pairs, _unscaled(ctx, pairs), strict=True):
                out[i] = gradient
        else:
            for i, gradient in pairs:
                crossed = _go_out(ctx.scale, gradient, ctx.tensors[i].dtype)
                before = out[i]
                out[i] = crossed if before is None else before + crossed
        return (None, None, None, *out)


def _unscaled(ctx: Any, pairs: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
    """Float32 gradients, laid out as their tensors are, or AccumulateGrad would copy them again."""
    gradients = [torch.empty_like(ctx.tensors[i], requires_grad=False) for i, _ in pairs]
    if not gradients:
        return gradients
    torch._foreach_copy_(gradients, [g for _, g in pairs])
    if ctx.scale is not None:
        for on_device in _by_device(gradients):
            torch._foreach_mul_(on_device, ctx.scale.inverse(on_device[0].device))
    return gradients


class _Leave(Function):
    """Hand a value out; its gradient comes in scaled."""

    @staticmethod
    def forward(ctx: Any, scale: Scale, value: Tensor, shares: bool) -> Tensor:
        ctx.scale, ctx.dtype = scale, value.dtype
        # A detached alias may be written to in place. Returned as it is, the value becomes a view
        # that autograd refuses to have written to: right where outputs share memory, since a
        # write would reach the others unseen.
        return value if shares else value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, _come_in(ctx.scale, gradient, ctx.dtype), None


class _WriteBack(Function):
    """Record that the graph wrote into an input, by way of the value that had entered for it."""

    @staticmethod
    def forward(ctx: Any, scale: Scale, written: Tensor, value: Tensor) -> Tensor:
        ctx.mark_dirty(written)
        ctx.scale, ctx.dtype = scale, value.dtype
        return written

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None, _come_in(ctx.scale, gradient, ctx.dtype)


def _left(scale: Scale, results: Any, inputs: Sequence[Tensor]) -> Any:
    """A graph's outputs with their gradients scaled; one tensor returned twice stays one."""
    owners = [_memory(t) for t in (*{id(t): t for t in results if _carries_gradient(t)}.values(),)]
    owners += [_memory(t) for t in inputs]
    left: dict[int, Tensor] = {}
    for value in results:
        if _carries_gradient(value) and id(value) not in left:
            left[id(value)] = _apply(_Leave, scale, value, owners.count(_memory(value)) > 1)
    return [left.get(id(value), value) for value in results]


class _Cross(Function):
    """Multiply by a factor on the way in or out; see the module's docstring."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        value: Tensor, factor: Tensor, dtype: torch.dtype, scale: Scale, is_coming_in: bool
    ) -> Tensor:
        return _times(value, factor, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        value, ctx.factor, _, ctx.scale, ctx.is_coming_in = inputs
        ctx.dtype = value.dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if ctx.is_coming_in:
            factor = ctx.factor * ctx.scale.inverse(gradient.device)
        else:
            factor = ctx.factor * ctx.scale.factor(gradient.device)
        back = _apply(_Cross, gradient, factor, ctx.dtype, ctx.scale, not ctx.is_coming_in)
        return back, None, None, None, None


def _come_in(scale: Scale, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    factor = scale.factor(gradient.device)
    if torch.is_grad_enabled():
        crossed: Tensor = _apply(_Cross, gradient, factor, dtype, scale, True)
        return crossed
    return _times(gradient, factor, dtype)


def _go_out(scale: Scale | None, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    if scale is None:
        return gradient.to(dtype)
    factor = scale.inverse(gradient.device)
    if torch.is_grad_enabled():
        crossed: Tensor = _apply(_Cross, gradient, factor, dtype, scale, False)
        return crossed
    return _times(gradient, factor, dtype)


def _times(value: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The product in at least float32: S and 1/S are beyond what float16 holds."""
    wide = torch.promote_types(value.dtype, torch.float32)
    return (value.to(wide) * factor).to(dtype)


def _apply(function: type[Function], *args: Any) -> Any:
    return function.apply(*args)


def _carries_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _is_plain(gradient: Tensor) -> bool:
    """Whether the fused calls take this gradient: it is dense, and not one of a vmap's."""
    return gradient.layout is torch.strided and not torch._C._functorch.is_batchedtensor(gradient)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _by_device(tensors: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    groups: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return groups.values()
