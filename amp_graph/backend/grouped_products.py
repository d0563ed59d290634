"""The products of a mixture of experts, by PyTorch's kernel for them.

transformers has two operators for rows times the matrix of each row's expert: PyTorch's, which in
a graph takes bfloat16 alone, and its own where a model that is captured has other weights. Its own
asks the host where each expert's rows end and multiplies expert by expert. A graph that was
captured in float32 and computes such a product in bfloat16 takes PyTorch's.

Private names of PyTorch used here:

    torch._grouped_mm    for bfloat16, rows and columns of 16 bytes each or a multiple
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from amp_graph.graphs.aten import op_name

OF_TRANSFORMERS = "transformers.grouped_mm_fallback.default"
ALIGNED = 16 // torch.bfloat16.itemsize  # elements
AMPERE = (8, 0)  # the oldest GPUs that have the kernel


def grouped_product(node: fx.Node) -> Callable[..., Any] | None:
    """Return PyTorch's kernel for a node that is such a product, or None if it cannot be used."""
    if op_name(node) != OF_TRANSFORMERS:
        return None
    rows, matrices = (operand.meta["val"] for operand in node.all_input_nodes[:2])
    can = _has_kernel(rows.device) and _is_aligned(rows) and _is_aligned(matrices)
    return torch._grouped_mm if can else None


def _has_kernel(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= AMPERE
    return device.type == "cpu"


def _is_aligned(operand: Tensor) -> bool:
    """Whether an operand is in bfloat16, with one of its two dimensions contiguous and all others
    aligned."""
    near, far = sorted(operand.stride()[-2:], key=lambda stride: stride != 1)
    sizes = operand.shape[-2:] if operand.dim() == 3 else operand.shape[-1:]
    are_known = all(type(n) is int for n in (near, far, *sizes))
    aligned = are_known and not any(n % ALIGNED for n in (far, *sizes))
    return operand.dtype is torch.bfloat16 and near == 1 and aligned
