"""The boundary of a graph that scales its gradients inside (`inner_scaling`).

    x, w, S, end ----> graph ----> leave ----> y        values
    dx, dw <---------- backward <-- choose S <- dy      gradients

Values cross as they are, and so do gradients. What is left to do: before a backward pass S is
chosen, where it is for one pass; and once the parameters have their gradients these are checked.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from amp_graph.boundary.crossing import enter_unscaled, leave_scaled_, not_captured
from amp_graph.boundary.inner_scaling import Inside
from amp_graph.boundary.scale import ModelScale, Scale
from amp_graph.gradients.engine import has_process_group
from amp_graph.gradients.transforms import applied, are_plain
from amp_graph.weak_references import are_still
from amp_graph.weights.picker import picker

_grad, _requires_grad = attrgetter("grad"), attrgetter("requires_grad")
_device, _dtype, _is_leaf = map(attrgetter, ("device", "dtype", "is_leaf"))


class InnerBoundary:
    """The boundary that calls such a graph.

    run: the graph.
    inside: the gradients that it scales.
    watched: runs it under a FirstNonfinite, which it takes first.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        inside: Inside,
        scale: ModelScale | None,
        watched: Callable[..., Any],
    ):
        self._run = run
        self._inside = inside
        self._scale = scale
        self._watched = watched
        self._pick_parameters = picker(inside.parameters)
        self._known: list[weakref.ref[Tensor]] = []  # the parameters of the call before

    def __call__(self, *args: Any) -> Any:
        if self._scale is None or not (torch.is_grad_enabled() and self._scale.is_on()):
            ones, ends = zip(*map(_constants.__getitem__, self._inside.devices), strict=True)
            return self._run(*args, *ones, ends[0].detach())
        inputs = [i for i in self._inside.inputs if args[i].requires_grad]
        parameters = self._pick_parameters(args)
        scale = self._scale.for_call([*map(args.__getitem__, inputs)])
        self._enter(scale, parameters)
        scale_inputs = scale.inputs_on(self._inside.devices)
        values = [*args, *scale_inputs.numbers, self._end(scale, parameters)]
        for i in inputs:
            values[i] = enter_unscaled(scale, args[i])
        run = self._run if scale.watch is None else partial(self._watched, scale.watch)
        results = [*run(*values)]
        leave_scaled_(scale_inputs, results, self._inside.results)
        return results

    def _enter(self, scale: Scale, parameters: Sequence[Tensor]) -> None:
        known = self._known
        if len(known) != len(parameters) or not are_still(known, parameters):
            scale.note_parameters(parameters)
            self._known = [*map(weakref.ref, parameters)]

    def _end(self, scale: Scale, parameters: Sequence[Tensor]) -> Tensor:
        """Return the input that autograd comes to last."""
        _, end = _constants[self._inside.devices[0]]
        if not any(map(_requires_grad, parameters)):
            return end.detach()
        leaves = [*compress(parameters, map(_is_leaf, parameters))]
        made: Tensor = applied(_End, scale, leaves, end)
        return made


class _End(Function):
    """The autograd function that checks the gradients that parameters have got. AccumulateGrad goes
    before everything else that is ready, so for gradients of this graph alone it has run by now."""

    @staticmethod
    def forward(ctx: Any, scale: Scale, parameters: Sequence[Tensor], end: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.parameters, ctx.device = scale, parameters, end.device
        return end.detach()

    @staticmethod
    @not_captured
    def backward(ctx: Any, _: Tensor | None) -> tuple[None, None, None]:
        # Gradients that several processes add up later are looked at then.
        if not (torch.is_grad_enabled() or has_process_group()):
            found = [gradient for gradient in map(_grad, ctx.parameters) if gradient is not None]
            if not _are_alike(found, ctx.device):  # the others are looked at by who uses them
                found = [gradient for gradient in found if _are_alike([gradient], ctx.device)]
            ctx.scale.checked.look_at(found)
        return None, None, None


def _are_alike(gradients: Sequence[Tensor], device: torch.device) -> bool:
    """Whether one fused call can take these gradients."""
    kinds = {*zip(map(_device, gradients), map(_dtype, gradients), strict=True)}
    return kinds <= {(device, torch.float32)} and are_plain(gradients)


class _Constants(dict[torch.device, tuple[Tensor, Tensor]]):
    """For each device, 1, and a leaf that requires a gradient."""

    @torch.inference_mode(False)
    def __missing__(self, device: torch.device) -> tuple[Tensor, Tensor]:
        one = torch.ones((), dtype=torch.float32, device=device)
        made = self[device] = one, torch.zeros_like(one).requires_grad_()
        return made


_constants = _Constants()
