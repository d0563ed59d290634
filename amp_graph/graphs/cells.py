"""Cells: one step of a recurrent layer on a CPU, in parts.

    h = gru_cell(x, h, weights)   ->   gates = linear(x, w), linear(h, v);  h = (h - n) * z + n

The products of a step may be low, while the state, which is added to at every step, is not to be
rounded at each: of the parts, each gets a colour of its own. On other devices a kernel of PyTorch
computes all of a step's gates, in float32 inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional as F

aten = torch.ops.aten


def gru_cell(input: Tensor, state: Tensor, *weights: Any) -> Tensor:
    """Return the next state, (batch, hidden) as `state`; `input`: (batch, features)."""
    of_state, of_input = _products(input, state, *weights)
    reset_x, update_x, new_x = of_input.chunk(3, 1)
    reset_h, update_h, new_h = of_state.chunk(3, 1)
    reset, update = (reset_h + reset_x).sigmoid(), (update_h + update_x).sigmoid()
    new = (new_x + new_h * reset).tanh()
    return (state - new) * update + new


def lstm_cell(input: Tensor, given: Sequence[Tensor], *weights: Any) -> tuple[Tensor, Tensor]:
    """Return the next output and state, (batch, hidden) each, as `given` has them."""
    output, state = given
    of_output, of_input = _products(input, output, *weights)
    entry, forget, new, exit = (of_output + of_input).chunk(4, 1)
    state = forget.sigmoid() * state + entry.sigmoid() * new.tanh()
    return exit.sigmoid() * state.tanh(), state


def _products(
    input: Tensor,
    hidden: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return F.linear(hidden, w_hh, b_hh), F.linear(input, w_ih, b_ih)


def _on_cpu(parts: Callable[..., Any], input: Tensor, *given: Any) -> Any:
    return parts(input, *given) if input.device.type == "cpu" else NotImplemented


CELLS: dict[OpOverload, Callable[..., Any]] = {
    aten.gru_cell.default: partial(_on_cpu, gru_cell),
    aten.lstm_cell.default: partial(_on_cpu, lstm_cell),
}
