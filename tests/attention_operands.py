"""What attention is called with."""

from __future__ import annotations

import torch

L, S, E = 5, 7, 8  # queries, keys, numbers per head


def operands(heads: int = 4, key_heads: int = 4, value_size: int = E) -> list[torch.Tensor]:
    shapes = (2, heads, L, E), (2, key_heads, S, E), (2, key_heads, S, value_size)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def bool_mask(*shape: int) -> torch.Tensor:
    """Some rows are masked altogether."""
    mask = torch.rand(shape) > 0.4
    mask[..., 1, :] = False
    return mask


def float_mask(*shape: int, requires_grad: bool = True) -> torch.Tensor:
    mask = torch.randn(shape)
    mask[..., 1, :] = float("-inf")
    mask[..., 2, 3] = float("-inf")
    return mask.requires_grad_(requires_grad)
