"""What a model of the benchmark is: a module, and its loss on fixed data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Workload:
    """A model and a function from model to loss, on fixed data."""

    model: nn.Module
    loss: Callable[[nn.Module], torch.Tensor]


# From a device, and whether to be of real size, for a large GPU, rather than for two CPU cores.
Factory = Callable[[str, bool], Workload]
