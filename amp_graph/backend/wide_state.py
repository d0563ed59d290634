"""A GRU on a CPU whose state is not rounded at each step.

    h = (h - n) * z + n, in float32;  products, gates and the layer's results in low precision

PyTorch runs the layer step by step there, all of it in the precision of its operands, so that a
state that is to be remembered over many steps is rounded as many times. Under autocast only the
products are low, since the state itself is no operand of theirs. So the layer is run under autocast
here. On other devices a kernel computes a step in float32 inside; the states of other layers are
either computed likewise (LSTM) or a tanh of a sum of products, low under autocast too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from amp_graph.dtypes import LOW

GRU = torch.ops.aten.gru.input


def wide_state(node: fx.Node) -> Callable[..., Any] | None:
    """Return the function that computes a GRU node with a float32 state; None for any other
    node."""
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
