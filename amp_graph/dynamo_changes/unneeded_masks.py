"""A mask that transformers leaves out where it is not captured, the graph leaves out, too.

    if is_tracing(mask): return False           so it makes a mask even where it was given none,
    if not is_tracing(indices) and (indices[:, -1] == 0).all(): return None
                                                where positions may have gaps,
    if ... padding_mask.all(): return True      and where something may be padded

Attention has faster kernels without a mask, which also keep none for backward. While anyone traces
it, transformers looks at no values, and makes masks in case. Here a capture finds what the model
would find: that no mask is given, that positions which were counted up have no gaps, and that a
mask is full which is made of ones, or is an input. A guard looks at each that is an input, as the
model does, until one is not full; what is captured for that one is right for all.

On 2.11 Dynamo takes every capture for `torch.export`, for which masks are made as well.

Private names of PyTorch used here:

    torch._dynamo.variables.TensorVariable.as_proxy, .dtype, .ndim       a value of the graph
    torch._dynamo.variables.torch.tracing_state_functions                what Dynamo says of itself

Of transformers, 5.17 and 5.23: the functions of `FINDS`. Versions without them make masks as they
did.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._dynamo.variables.torch import tracing_state_functions

from amp_graph.dynamo_changes.known_calls import Find, asked_instead, looked_at
from amp_graph.graphs.writes import is_as_made


def leaves_out_causal(
    padding_mask: Tensor,
    q_length: int,
    kv_length: int,
    q_offset: int,
    kv_offset: int,
    local_attention_size: int | None = None,
) -> bool:
    """Whether causal attention needs no mask beside `is_causal=True`."""
    return q_length == kv_length and leaves_out_bidirectional(
        padding_mask, kv_length, local_attention_size
    )


def leaves_out_bidirectional(
    padding_mask: Tensor, kv_length: int, local_attention_size: int | None = None
) -> bool:
    """Whether attention in both directions needs no mask."""
    is_local = local_attention_size is not None and kv_length >= local_attention_size
    return not is_local and is_full(padding_mask)


def is_full(mask: Tensor) -> bool:
    """Whether nothing is masked. The host waits for the answer."""
    return bool(mask.all())


def _traces(code: Any, frame: Any, value: Any) -> Any:
    is_none = value.is_python_constant() and value.as_python_constant() is None
    return ConstantVariable.create(False) if is_none else None


def _packed(code: Any, frame: Any, positions: Any) -> Any:
    if isinstance(positions, TensorVariable) and positions.ndim == 2 and _counts_up(positions):
        return ConstantVariable.create(None)
    return None


def _before_casts(node: fx.Node) -> fx.Node:
    while node.target == "to" and is_as_made(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _counts_up(value: Any) -> bool:
    """Whether each number along the last dimension is one more than the one before."""
    if value.dtype is not torch.int64:
        return False
    node = value.as_proxy().node
    while is_as_made(node):
        if node.target is torch.arange:
            return len(node.args) <= 2 and not node.kwargs.keys() & {"step", "out"}
        if not _keeps_steps(node):
            return False
        node = node.args[0]
    return False


def _keeps_steps(node: fx.Node) -> bool:
    """Whether a result counts up if its first argument does."""
    match node.target, *node.args[1:]:
        case ((operator.add | "add"), other):  # a method under a mode, as of a default device
            value = other.meta.get("example_value") if isinstance(other, fx.Node) else other
            return not isinstance(value, Tensor) and isinstance(node.args[0], fx.Node)
        case "expand", *_, -1:
            return True
        case ("unsqueeze", 0) | (operator.getitem, None):
            return True
        case operator.getitem, (None, slice(start=None, stop=None, step=None)):
            return True
    return False


def _full(code: Any, frame: Any, mask: Any) -> Any:
    is_made = _is_made_of_ones(_before_casts(mask.as_proxy().node))
    return ConstantVariable.create(True) if is_made else LOOK(code, frame, mask)


def _is_made_of_ones(node: fx.Node) -> bool:
    fills = 1 in (node.kwargs.get("fill_value"), *node.args[1:2])
    is_made = node.target in ONES or (node.target is torch.full and fills)
    return is_made and "out" not in node.kwargs and is_as_made(node)


ONES = (torch.ones, torch.ones_like, "new_ones")
LOOK = looked_at(is_full, "no zeros in it", _before_casts)
MASKS = "transformers.masking_utils"
FINDS: dict[tuple[str, str], Find] = {
    ("transformers.utils.import_utils", "is_tracing"): _traces,
    (MASKS, "find_packed_sequence_indices"): _packed,
    (MASKS, "_ignore_causal_mask_sdpa"): asked_instead(leaves_out_causal),
    (MASKS, "_ignore_bidirectional_mask_sdpa"): asked_instead(leaves_out_bidirectional),
    (__name__, "is_full"): _full,
}
ENTRIES = ((tracing_state_functions, {torch.compiler.is_exporting: False}),)
