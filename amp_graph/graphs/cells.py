"""Cells: one step of a recurrent layer on a CPU, in parts.

    h = gru_cell(x, h, weights)   ->   gates = linear(x, w), linear(h, v);  h = (h - n) * z + n

The products of a step may be low, while the state, which is added to at every step, is not to be
rounded at each: of the parts, each gets a colour of its own. On other devices a kernel of PyTorch
computes all of a step's gates, in float32 inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional as F


def gru_cell(
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    """The state that follows: (batch, hidden), as `hx`; `input`: (batch, features)."""
    if not _is_on_cpu(input):
        return NotImplemented
    reset_x, update_x, new_x = F.linear(input, w_ih, b_ih).chunk(3, 1)
    reset_h, update_h, new_h = F.linear(hx, w_hh, b_hh).chunk(3, 1)
    reset, update = (reset_h + reset_x).sigmoid(), (update_h + update_x).sigmoid()
    new = (new_x + new_h * reset).tanh()
    return (hx - new) * update + new


def lstm_cell(
    input: Tensor,
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    """The output and the state that follow: (batch, hidden) each, as `hx` has them."""
    if not _is_on_cpu(input):
        return NotImplemented
    hidden, state = hx
    gates = F.linear(hidden, w_hh, b_hh) + F.linear(input, w_ih, b_ih)
    entry, forget, new, exit = gates.chunk(4, 1)
    state = forget.sigmoid() * state + entry.sigmoid() * new.tanh()
    return exit.sigmoid() * state.tanh(), state


def _is_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


CELLS: dict[OpOverload, Callable[..., Any]] = {
    torch.ops.aten.gru_cell.default: gru_cell,
    torch.ops.aten.lstm_cell.default: lstm_cell,
}
