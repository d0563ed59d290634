"""Find out whether gradients overflowed, on the device and agreed between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_graph.gradients.checked_gradients import CheckedGradients
from amp_graph.gradients.engine import (
    any_of,
    check_and_unscale_,
    has_process_group,
    look_at_,
    sent,
)
from amp_graph.gradients.shards import agree_, are_sharded, raise_to_largest_

_grad, _layout = attrgetter("grad"), attrgetter("layout")
_device, _dtype = attrgetter("device"), attrgetter("dtype")


def is_alone() -> bool:
    """Whether no other process trains together with this one."""
    return not has_process_group() or torch.distributed.get_world_size() == 1


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters that an optimizer steps."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def found_inf(
    parameters: Iterable[Tensor],
    inverse: Tensor | None = None,
    checked: CheckedGradients | None = None,
) -> Tensor:
    """Return 1 if any gradient of these parameters holds an infinity or NaN, else 0: a
    0-dimensional float32 tensor on the first gradient's device, or the first parameter's with data
    if there are no gradients. The host does not wait.

    With `inverse` (1/S) the gradients are unscaled in the same pass; those that were `checked` when
    they were made are not read again. Ranks that hold shards of the same gradients (FSDP) get the
    same answer, also one whose shards have none; each of them has to ask.
    """
    parameters, alone = [*parameters], is_alone()
    found = _found_here(parameters, inverse, checked if alone else None)
    if not alone and (sharded := are_sharded(parameters)):
        agree_(found, sharded)
    return found


def _found_here(
    parameters: Sequence[Tensor], inverse: Tensor | None, checked: CheckedGradients | None
) -> Tensor:
    """Return `found_inf` as far as this rank knows, and those that hold parts of the same
    DTensors."""
    gradients = [gradient for gradient in map(_grad, parameters) if gradient is not None]
    if not gradients:
        device = next((p.device for p in parameters if not p.is_meta), None)
        return torch.zeros((), dtype=torch.float32, device=device)
    meshes = {} if {*map(type, gradients)} == {Tensor} else _meshes(gradients)
    dtypes, layouts = {*map(_dtype, gradients)}, {*map(_layout, gradients)}
    are_complex = dtypes != {torch.float32} and any(dtype.is_complex for dtype in dtypes)
    if meshes or layouts != {torch.strided} or are_complex:
        gradients = [*map(_numbers, gradients)]
    flags: list[Tensor] = []
    unknown = gradients
    if checked is not None:
        flags, unknown = checked.known(gradients)
    if unknown:
        flags = _look_into(unknown, inverse, flags)
    found = any_of(flags, gradients[0].device)
    for mesh in meshes.values():
        is_there = found.device.type == mesh.device_type
        device = found.device if is_there else torch.device(mesh.device_type)
        for dimension in range(mesh.ndim):
            raise_to_largest_(found, mesh.get_group(dimension), device)
    return found


def _meshes(gradients: Iterable[Tensor]) -> dict[int, Any]:
    """By their ids, those of DTensors: told without their module, which is slow to import."""
    meshes = [g.device_mesh for g in gradients if hasattr(g, "device_mesh")]
    return {id(mesh): mesh for mesh in meshes}


def _numbers(gradient: Tensor) -> Tensor:
    """Return the local, dense, real numbers of a gradient, as a tensor that fused calls take."""
    if hasattr(gradient, "device_mesh"):
        gradient = gradient.to_local()  # type: ignore[attr-defined]
    gradient = gradient if gradient.layout is torch.strided else gradient._values()
    if not gradient.is_complex():
        return gradient
    return torch.view_as_real(gradient.conj() if gradient.is_conj() else gradient)


@torch.no_grad()
def _look_into(
    gradients: Sequence[Tensor], inverse: Tensor | None, flags: Sequence[Tensor]
) -> list[Tensor]:
    """Look at the gradients of each device into one of the flags there, or into a new one. Returns
    all flags."""
    on_device = {flag.device: flag for flag in flags}
    kinds = [*zip(map(_device, gradients), map(_dtype, gradients), strict=True)]
    for kind in dict.fromkeys(kinds):
        device, group = kind[0], [*compress(gradients, map(kind.__eq__, kinds))]
        flag = on_device.get(device)
        if flag is None:
            flag = on_device[device] = torch.zeros((), dtype=torch.float32, device=device)
        if inverse is None:
            look_at_(group, flag)
        else:
            factor = sent(inverse, device)
            check_and_unscale_(group, flag, factor)
    return [*dict.fromkeys((*flags, *on_device.values()))]
