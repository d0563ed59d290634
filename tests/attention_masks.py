"""With which masks a model calls attention, by itself and in its graphs."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from grappler import captured_plans
from torch import Tensor, nn
from torch.nn import functional as F

Call = tuple[bool, bool]  # has a mask, is said to be causal


def in_model(model: nn.Module, *args: Any, **kwargs: Any) -> list[Call]:
    """Of each call of attention in one of the model."""
    seen = []
    attention = F.scaled_dot_product_attention

    def recording(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **rest: Any,
    ) -> Tensor:
        seen.append((attn_mask is not None, bool(is_causal)))
        return attention(q, k, v, attn_mask, dropout_p, is_causal, **rest)

    with mock.patch.object(F, "scaled_dot_product_attention", recording):
        model(*args, **kwargs)
    return seen


def in_graphs(model: nn.Module, *args: Any, **kwargs: Any) -> list[Call]:
    """Of each call of attention in what is captured for one of the model, which is converted."""
    seen = []
    for graph, _ in captured_plans(model, args, kwargs, "bfloat16"):
        for node in graph.graph.nodes:
            if node.target is torch.ops.aten.scaled_dot_product_attention.default:
                names = ("attn_mask", "dropout_p", "is_causal")
                given = dict(zip(names, node.args[3:], strict=False)) | node.kwargs
                seen.append((given.get("attn_mask") is not None, given.get("is_causal", False)))
    return seen
