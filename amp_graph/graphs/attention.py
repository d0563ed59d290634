"""Attention: which calls PyTorch answers with its math kernel, and the parts of such a call.

`scaled_dot_product_attention` picks one of several kernels each time it is called. The fused ones
take low-precision operands. The math kernel casts them to float32 first (unless
`torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp` says otherwise), so that both matrix
products run in float32. Private names of PyTorch used here:

    torch._fused_sdp_choice                     the kernel that a call takes
    fx.traceback.get_current_meta()["custom"]   copied to the nodes that tracing makes
    torch.utils._python_dispatch._disable_current_modes
    torch._safe_softmax                         of rows that are masked as a whole
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import fx
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import _disable_current_modes

from amp_graph.graphs.fake import size_hint

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_choose_kernel: Callable[..., int] = torch._fused_sdp_choice
WIDENS = "amp_graph: widens low-precision operands"


def note_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    """Note on the node about to be traced whether the call would widen its operands.

    Stands in the decomposition table of a trace, because only there is it still known which
    operands need a gradient; it decomposes nothing.
    """
    operands = (query, key, value, attn_mask)
    meta = fx_traceback.get_current_meta()
    noted = _takes_math_kernel(operands, dropout_p, is_causal, options)
    meta["custom"] = {**meta.get("custom", {}), WIDENS: noted}
    return NotImplemented


def widens(node: fx.Node) -> bool:
    """Whether a node is attention that would cast low-precision operands to float32."""
    return node.target is ATTENTION and bool(node.meta.get("custom", {}).get(WIDENS))


def _takes_math_kernel(
    operands: tuple[torch.Tensor | None, ...],
    dropout_p: float,
    is_causal: bool,
    options: dict[str, Any],
) -> bool:
    """Ask PyTorch which kernel it takes for such operands in low precision.

    The choice depends on shapes, on whether the mask needs a gradient, on dropout, and on the
    kernels that the user has enabled; on CUDA also on the GPU. On other devices, and where no
    kernel is left, the call is not touched.
    """
    device = operands[0].device.type if operands[0] is not None else ""
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        return False
    if torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        return False
    if any(t is not None and t.is_nested for t in operands):
        return False
    # For fake tensors the answer is always the math kernel, whatever their device.
    with _disable_current_modes(), contextlib.suppress(RuntimeError):
        query, key, value, mask = map(_stand_in, operands)
        choice = _choose_kernel(query, key, value, mask, dropout_p, is_causal, **options)
        return choice == SDPBackend.MATH.value
    return False


def _stand_in(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a real tensor in low precision like this one. On CPU it is a single row of memory, as
    the choice there regards the last stride alone."""
    if tensor is None:
        return None
    sizes = [size_hint(s) for s in tensor.shape]
    strides = [size_hint(s) for s in tensor.stride()]
    if tensor.device.type == "cpu":
        strides[:-1] = [0] * len(strides[:-1])
    length = 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True) if n)
    dtype = torch.float16 if tensor.dtype is torch.float32 else tensor.dtype
    memory = torch.empty(length, dtype=dtype, device=tensor.device)
    needs_grad = tensor.requires_grad and dtype.is_floating_point
    return memory.as_strided(sizes, strides).requires_grad_(needs_grad)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute `scaled_dot_product_attention`, with an operator for each step.

    The math kernel multiplies query and key by the square root of the scale each, and adds a mask
    of booleans as one of zeros and infinities. Here the query alone is scaled, which rounds once
    less (not at all if the scale is a power of two, as with 16 or 64 numbers per head) and still
    before the product, whose results might not fit into float16 otherwise.
    """
    scale = query.size(-1) ** -0.5 if scale is None else scale
    query = query if scale == 1.0 else query * scale
    if enable_gqa:
        key, value = (t.repeat_interleave(query.size(-3) // t.size(-3), -3) for t in (key, value))
    if is_causal:
        shape = (query.size(-2), key.size(-2))
        attn_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    scores = query @ key.transpose(-2, -1)
    if attn_mask is None:
        weights = scores.softmax(-1)
    elif attn_mask.dtype is torch.bool:
        weights = torch._safe_softmax(scores.masked_fill(~attn_mask, float("-inf")), -1)
    else:
        weights = torch._safe_softmax(scores + attn_mask, -1)
    if dropout_p > 0.0:
        weights = torch.dropout(weights, dropout_p, True)
    return weights @ value
