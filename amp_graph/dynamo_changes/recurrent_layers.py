"""Recurrent layers stay one operator while a model is captured.

    gru(x, h, weights)   ->   output (time, batch, hidden), last hidden states

For shapes PyTorch runs most of them on fake tensors step by step, which takes seconds for long
sequences and fixes their length in the graph. Here their shapes are told without the steps.

Private names of PyTorch used here:

    OpOverload.py_kernels, OpOverload._dispatch_cache    what the Python dispatcher runs
    torch._decomp.decompositions                         its import sets what they are by default
    torch._C.DispatchKey
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch._decomp.decompositions
from torch import Tensor
from torch._C import DispatchKey

from amp_graph.dtypes import LOW
from amp_graph.dynamo_changes.replaced import with_entries
from amp_graph.graphs.aten import RECURRENT

KEY = DispatchKey.CompositeImplicitAutograd


@contextlib.contextmanager
def recurrent_layers_whole() -> Iterator[None]:
    """Have the Python dispatcher, within, take the layers' results from `results`."""
    with contextlib.ExitStack() as inside:
        for layer in RECURRENT:
            inside.callback(layer._dispatch_cache.clear)
            inside.enter_context(with_entries(layer.py_kernels, {KEY: results}))
            layer._dispatch_cache.clear()
        yield


def results(
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Return fake tensors like the layer's results: sizes, strides, dtype, device, and a gradient
    if any operand needs one. Operands of several dtypes occur under autocast alone, which converts
    them to one."""
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    operands = [input, *states, *params]
    dtypes = {t.dtype for t in operands}
    is_cast = dtypes <= {torch.float32, *LOW} and torch.is_autocast_enabled(input.device.type)
    if len(dtypes) > 1 and not is_cast:
        raise RuntimeError("the operands of a recurrent layer have several dtypes")
    touched = torch.stack([t.sum() for t in operands]).sum()
    batch, time = input.shape[:2] if batch_first else (input.shape[1], input.shape[0])
    width = states[0].shape[2] * (2 if bidirectional else 1)
    output = input.new_empty(time, batch, width, dtype=touched.dtype) + touched
    last = [input.new_empty(state.shape, dtype=touched.dtype) + touched for state in states]
    return output.transpose(0, 1) if batch_first else output, *last


CONTEXTS = (recurrent_layers_whole,)
