"""Whether gradients overflowed, on the device and agreed between ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_graph.training.together import merged


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters that an optimizer steps."""
    return [p for group in optimizer.param_groups for p in group["params"]]


@torch.no_grad()
def found_inf(parameters: Iterable[Tensor], inverse: Tensor | None = None) -> Tensor:
    """Return 1 if any gradient of these parameters holds an infinity or NaN, else 0: a
    0-dimensional float32 tensor on the first gradient's device. The host does not wait.

    With `inverse` (1/S) the gradients are unscaled in the same pass. Ranks that hold shards of the
    same gradients (FSDP) get the same answer.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    meshes: dict[int, Any] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if hasattr(gradient, "device_mesh"):  # a DTensor; its module is slow to import
            meshes[id(gradient.device_mesh)] = gradient.device_mesh
            gradient = gradient.to_local()  # type: ignore[attr-defined]
        if gradient.layout is not torch.strided:
            gradient = gradient._values()
        groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    found = torch.zeros((), device=next(iter(groups), ("cpu",))[0])
    for (device, _), gradients in groups.items():
        on_device = found if device == found.device else torch.zeros((), device=device)
        factor = torch.ones((), device=device) if inverse is None else inverse.to(device)
        torch._amp_foreach_non_finite_check_and_unscale_(merged(gradients), on_device, factor)
        if on_device is not found:
            found = torch.maximum(found, on_device.to(found.device, non_blocking=True))
    for mesh in meshes.values():
        for dimension in range(mesh.ndim):
            torch.distributed.all_reduce(
                found, torch.distributed.ReduceOp.MAX, group=mesh.get_group(dimension)
            )
    return found
