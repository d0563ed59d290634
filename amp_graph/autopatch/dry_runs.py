"""Calls of a model in which Keras only asks what sizes come of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from amp_graph.autopatch.left_alone import is_on_meta


def is_dry_run(module: nn.Module, given: Any) -> bool:
    """Whether a module that is not on the meta device is asked by Keras what sizes come of what it
    is given, and has stand-ins for its parameters."""
    return _are_described(given) and not is_on_meta(module)


def parameters_by_now(module: nn.Module, given: Any) -> Iterator[nn.Parameter]:
    """Yield the parameters that a module has by now. Keras, which lists them in a way of its own,
    would keep stand-ins if it were asked in a dry run."""
    if type(module).named_parameters is not nn.Module.named_parameters and _are_described(given):
        return (p for _, p in nn.Module.named_parameters(module))
    return module.parameters()


def _are_described(given: Any) -> bool:
    """Whether there are tensors of which no more is there than what they are like."""
    return any(
        x.is_meta if isinstance(x, torch.Tensor) else type(x).__name__ == "KerasTensor"
        for x in tree_leaves(given)
    )
