"""What of a model's output is compared, and trained on where no loss is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from amp_graph.errors import AmpGraphError


def default_loss(output: Any) -> torch.Tensor:
    """The loss that the output carries, if it does; else the mean square of its values."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    squares = [t.float().square().mean() for t in floating(output) if t.numel()]
    if not squares:
        raise AmpGraphError("the model's outputs are empty; give a batch that has samples")
    return torch.stack(squares).sum()


def floating(output: Any) -> list[torch.Tensor]:
    """The floating tensors of an output, whatever holds them, with complex ones as pairs."""
    known = isinstance(output, (torch.Tensor, Mapping, list, tuple))
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    if not known and hasattr(output, "__dict__"):
        leaves = tree_leaves(vars(output))
    tensors = [_as_real(t) for t in leaves if isinstance(t, torch.Tensor)]
    return [t for t in tensors if t.is_floating_point()]


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
