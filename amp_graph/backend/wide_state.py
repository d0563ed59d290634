"""A GRU on a CPU whose state is not rounded at each step.

    h = (h - n) * z + n, in float32;  products, gates and the layer's results in low precision

PyTorch runs the layer step by step there, all of it in the precision of its operands, and what a
state is to remember over many steps is rounded as many times. Under autocast its products alone
are low, since the state is no operand of theirs by itself: so it is run here. On other devices a
kernel computes a step in float32 inside, and the states of the other layers are either that
(LSTM) or a tanh of a sum of products, low under autocast too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from amp_graph.dtypes import LOW

GRU = torch.ops.aten.gru.input


def wide_state(node: fx.Node) -> Callable[..., Any] | None:
    """What computes a node that is such a layer instead."""
    if node.target is not GRU:
        return None
    output, _ = node.meta["val"]
    return _gru if output.device.type == "cpu" and output.dtype in LOW else None


def _gru(input: Tensor, state: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    if input.dtype not in LOW:  # widened by `emulation`
        return torch.gru(input, state, *how)
    with torch.autocast("cpu", input.dtype):
        output, last = torch.gru(input, state.float(), *how)
    return output.to(input.dtype), last.to(input.dtype)
