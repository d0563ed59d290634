"""Floating-point operations of a node, by the formulas of `torch.utils.flop_counter`.

The operator runs on fake tensors of the sizes seen when captured, and everything that it comes
down to is counted. Kernels without a formula count nothing, as in torch's own counter.
`flex_attention` counts all scores, those too that are masked, as in torch's own since 2.13.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from amp_graph.dynamo_changes.logs import quiet_logs
from amp_graph.graphs.aten import FLEX_ATTENTION, is_operator
from amp_graph.graphs.fake import concrete, size_hint

aten = torch.ops.aten


def attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """The formula of attention, of its shapes."""
    flops: int = sdpa_flop_count(query, key, value)
    return flops


def recurrent_flops(steps: Sequence[int], *weights: Sequence[int]) -> int:
    """The formula of recurrent layers: each matrix, a projection too, is multiplied with each step
    of each sequence, packed or not. Biases and gates count nothing, as in cells."""
    return 2 * math.prod(steps[:-1]) * sum(math.prod(w) for w in weights if len(w) == 2)


# torch 2.13 counts every fused attention kernel but that of the CPU, and no fused recurrent layer.
FORMULAS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    aten.mkldnn_rnn_layer: lambda x, w_ih, w_hh, *_, **__: recurrent_flops(x, w_ih, w_hh),
    aten._cudnn_rnn: lambda x, weights, *_, **__: recurrent_flops(x, *weights),
    aten.miopen_rnn: lambda x, weights, *_, **__: recurrent_flops(x, *weights),
    aten._lstm_mps: lambda x, states, weights, *_, **__: recurrent_flops(x, *weights),
}


class FlopCounts:
    """How many floating-point operations one run of a node takes; 0 if it cannot be said. Layers
    repeat: operators that are given the same are counted once."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def of(self, node: fx.Node) -> int:
        if not is_operator(node):
            return 0
        named = tuple((name, _given(value)) for name, value in node.kwargs.items())
        given = node.target, _given(node.args), named
        if given not in self._known:
            self._known[given] = _counted(node)
        return self._known[given]


def _given(argument: Any) -> Hashable:
    """Return what decides how much is computed with an argument: for a tensor the sizes seen when
    captured, dtype and device."""
    if isinstance(argument, fx.Node):
        argument = argument.meta.get("val")
    if isinstance(argument, torch.Tensor):
        return tuple(map(size_hint, argument.shape)), argument.dtype, argument.device
    if isinstance(argument, list | tuple):
        return tuple(map(_given, argument))
    if isinstance(argument, torch.SymInt):
        return size_hint(argument)
    if isinstance(argument, torch.SymFloat | torch.SymBool):  # may depend on data
        return type(argument).__name__
    return (type(argument), argument) if isinstance(argument, Hashable) else id(argument)


def _counted(node: fx.Node) -> int:
    counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
    # Sizes that depend on data are assumed, each by itself, and may not fit one another.
    with FakeTensorMode(), quiet_logs(), contextlib.suppress(Exception), torch.no_grad():
        values = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        args, kwargs = tree_map(concrete, values)
        if node.target is FLEX_ATTENTION:  # which would compute all that it has bodies for
            return attention_flops(*(operand.shape for operand in args[:3]))
        with counter:
            node.target(*args, **kwargs)  # type: ignore[operator]
    return int(counter.get_total_flops())
