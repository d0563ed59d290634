"""The parts that attention is split into compute what it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_operands import E, L, S, bool_mask, float_mask, operands
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from amp_graph.graphs.attention import attention

whole = nn.functional.scaled_dot_product_attention
MASKS: dict[str, Callable[[], dict[str, Any]]] = {
    "no mask": dict,
    "causal": lambda: {"is_causal": True},
    "bool": lambda: {"attn_mask": bool_mask(L, S)},
    "bool per head": lambda: {"attn_mask": bool_mask(2, 4, L, S)},
    "bool of one row": lambda: {"attn_mask": torch.rand(2, 1, 1, S) > 0.4},
    "float": lambda: {"attn_mask": float_mask(2, 1, L, S, requires_grad=False)},
    "float with gradient": lambda: {"attn_mask": float_mask(1, 4, L, S)},
    "largest number": lambda: {"attn_mask": torch.where(bool_mask(L, S), 0.0, -3.4e38)},
}
SCALES = {"default": None, "one": 1.0, "given": 0.7, "negative": -0.3}
HEADS = {"heads": 4, "grouped heads": 2}


def gradients(function: Callable[..., torch.Tensor], args: list[Any], options: dict[str, Any]):
    torch.manual_seed(1)
    result = function(*args, **options)
    leaves = [t for t in (*args, options.get("attn_mask")) if t is not None and t.requires_grad]
    direction = torch.randn(result.shape, generator=torch.Generator().manual_seed(2))
    return [result, *torch.autograd.grad(result, leaves, direction)]


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("mask", MASKS)
def test_parts_compute_the_same(mask: str, scale: str, heads: str, dropout_p: float) -> None:
    """Also the same random numbers are dropped: the math kernel drops what the parts drop."""
    args = operands(key_heads=HEADS[heads])
    options = MASKS[mask]() | {"scale": SCALES[scale], "dropout_p": dropout_p}
    options["enable_gqa"] = heads == "grouped heads"
    with sdpa_kernel(SDPBackend.MATH):
        expected = gradients(whole, args, options)
    for found, wanted in zip(gradients(attention, args, options), expected, strict=True):
        assert (found - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.parametrize(
    "shapes",
    [
        [(L, E), (S, E), (S, E)],
        [(3, L, E), (3, S, E), (3, S, 2)],
        [(2, 4, L, E), (2, 1, S, E), (2, 1, S, E)],
        [(2, 3, 4, L, E), (2, 3, 4, S, E), (2, 3, 4, S, E)],
        [(1, 1, L, 1), (1, 1, 1, 1), (1, 1, 1, 1)],
        [(2, 4, 0, E), (2, 4, S, E), (2, 4, S, E)],
    ],
    ids=str,
)
def test_parts_take_every_shape(shapes: list[tuple[int, ...]]) -> None:
    args = [torch.randn(shape, requires_grad=True) for shape in shapes]
    for options in ({}, {"is_causal": True}):
        expected = gradients(whole, args, options)
        for found, wanted in zip(gradients(attention, args, options), expected, strict=True):
            assert (found - wanted).norm() <= 1e-6 * wanted.norm()
