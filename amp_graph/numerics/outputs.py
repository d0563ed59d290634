"""The outputs of a model that are compared, and trained on where no loss is given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from amp_graph.errors import AmpGraphError, in_brief
from amp_graph.results import tensors_in


def default_loss(output: Any) -> torch.Tensor:
    """The loss that the output carries, if it does; else the mean square of its values."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    squares = [t.float().square().mean() for t in floating(output) if t.numel()]
    if not squares:
        raise AmpGraphError("the model's outputs are empty; give a batch that has samples")
    return torch.stack(squares).sum()


def check_loss(loss: Any, scale: Any) -> None:
    """Raises AmpGraphError unless `loss` can be called, if there is one, and `scale` is above 0."""
    if loss is not None and not callable(loss):
        raise AmpGraphError(f"loss is a function of the model's output, not {in_brief(loss)}")
    if not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
        raise AmpGraphError(f"loss_scale is a number above 0, not {in_brief(scale)}")


def check_bound(bound: Any) -> None:
    if not isinstance(bound, (int, float)) or not bound >= 0:
        raise AmpGraphError(f"the bound must be a number that is not negative, not {bound!r}")


def floating(output: Any) -> list[torch.Tensor]:
    """The floating tensors of an output, whatever holds them, with complex ones as pairs."""
    if isinstance(output, Mapping):
        output = dict(output)
    elif callable(output) and not isinstance(output, torch.nn.Module):
        output = getattr(output, "__dict__", output)
    return [t for t in map(_as_real, tensors_in(output)) if t.is_floating_point()]


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
