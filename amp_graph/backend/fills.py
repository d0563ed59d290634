"""Masks filled with a number that a low precision does not hold, in graphs left to autocast.

    scores.masked_fill(mask, torch.finfo(scores.dtype).min)    a model
    scores.masked_fill(mask, -3.4028e+38)                      its graph, captured in float32
    filled(scores, mask, -3.4028e+38)                          as above: -3.3895e+38 in bfloat16

Under autocast the scores are low, and PyTorch raises for the number that the model would not have
asked for there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from amp_graph.dtypes import LOW
from amp_graph.flow import is_beyond, saturated


def filled(tensor: Tensor, mask: Tensor, value: float) -> Tensor:
    return tensor.masked_fill(mask, _held(tensor, value))


def filled_in_place(tensor: Tensor, mask: Tensor, value: float) -> Tensor:
    return tensor.masked_fill_(mask, _held(tensor, value))


FILLS: dict[Any, Callable[..., Tensor]] = {
    "masked_fill": filled,
    "masked_fill_": filled_in_place,
    torch.masked_fill: filled,
}


def saturating_fill(node: fx.Node) -> Callable[..., Tensor] | None:
    """Return what is to be called in place of a node of Dynamo's graph that fills with such a
    number; None of any other."""
    value = node.kwargs.get("value", node.args[-1] if node.args else None)
    if isinstance(value, int | float) and any(is_beyond(value, dtype) for dtype in LOW):
        return FILLS.get(node.target)
    return None


def _held(tensor: Tensor, value: float) -> float:
    return saturated(float(value), tensor.dtype) if tensor.dtype in LOW else value
