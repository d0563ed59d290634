"""Fused optimizers, which skip a step themselves.

Private names of PyTorch used here:

    Optimizer._step_supports_amp_scaling    what GradScaler looks at
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer


def begin_momentum(optimizer: Optimizer) -> bool:
    """Give zeros to each parameter that is to have momentum and has none: what a fused SGD skips in
    a parameter's first step is to initialise it (torch 2.13), and from zeros that step is the same.
    False if it would not be: the first step of one that is dampened is not."""
    missing = [
        (group, parameter)
        for group in optimizer.param_groups
        if group.get("momentum")
        for parameter in group["params"]
        if parameter.grad is not None and _momentum_of(parameter, optimizer) is None
    ]
    if not missing:
        return True
    if any(type(optimizer).step is not SGD.step or group["dampening"] for group, _ in missing):
        return False
    for _, parameter in missing:
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)
    return True


def _momentum_of(parameter: Tensor, optimizer: Optimizer) -> Tensor | None:
    momentum: Tensor | None = optimizer.state.get(parameter, {}).get("momentum_buffer")
    return momentum


def is_fused(optimizer: Optimizer) -> bool:
    """Whether an optimizer takes `found_inf`: not one with a group that is not fused, or not any
    more, by the checkpoint it was loaded from."""
    is_one = isinstance(optimizer, Optimizer)  # and no wrapper that has the attributes of one
    are_fused = is_one and getattr(optimizer, "_step_supports_amp_scaling", False)
    return are_fused and all(group.get("fused", True) for group in optimizer.param_groups)
