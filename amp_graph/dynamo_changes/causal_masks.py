"""Whether a mask of `nn.Transformer` is the causal one is found while it is captured.

    encoder(x, mask)   ->   attention(q, k, v, is_causal=True) in each layer, or with the mask

Encoder and decoder look into a mask for that, since attention has a kernel for it without a mask.
The answer depends on data, so that the graph would break inside torch.nn, whose code Dynamo does
not capture by itself. Here a mask that was made by `generate_square_subsequent_mask` is known, and
one that the graph takes is looked at, in later calls by a guard. Any other, and all those that come
once one was not causal, are applied as given, to the same result.

Private names of PyTorch used here:

    torch.nn.modules.transformer._detect_is_causal_mask     what it asks
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.variables import ConstantVariable

from amp_graph.dynamo_changes.known_calls import Find, asked_instead, looked_at
from amp_graph.graphs.writes import is_as_made


def found_causal(mask: Tensor, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Whether a mask is causal: as the caller says or, where nothing is said, by its numbers and
    size."""
    if is_causal is not None:
        return is_causal is True
    length = mask.size(-1)
    is_square = mask.dim() == 2 and mask.size(0) == length and (size is None or size == length)
    return is_square and hides_what_follows(mask)


def hides_what_follows(mask: Tensor) -> bool:
    """Whether a square matrix of booleans, or of numbers to add, is the causal mask. The host waits
    for the answer."""
    hidden = True if mask.dtype is torch.bool else -math.inf
    return torch.equal(mask, torch.full_like(mask, hidden).triu(1))


def _is_causal(code: Any, frame: Any, mask: Any) -> Any:
    is_made = _is_made_causal(mask.as_proxy().node)
    return ConstantVariable.create(True) if is_made else LOOK(code, frame, mask)


def _is_made_causal(node: fx.Node) -> bool:
    match node.target, *node.args, *node.kwargs.values():
        case torch.triu, fx.Node(target=torch.full, args=(_, hidden)) as full, 1:
            return bool(hidden == -math.inf) and is_as_made(full) and is_as_made(node)
    return False


def _given(node: fx.Node) -> fx.Node:
    """Return the mask as it was before booleans became numbers to add."""
    match node.target, *node.args:
        case "masked_fill_", fx.Node(target=torch.zeros_like), fx.Node() as mask, hidden:
            if hidden == -math.inf and is_as_made(node):
                return mask
    return node


LOOK = looked_at(hides_what_follows, "it is the causal mask", _given)
FINDS: dict[tuple[str, str], Find] = {
    ("torch.nn.modules.transformer", "_detect_is_causal_mask"): asked_instead(found_causal),
    (__name__, "hides_what_follows"): _is_causal,
}
