"""The CPU's own kernels for low precision, and what PyTorch emulates without them.

Private names of PyTorch used here:

    torch.ops.mkldnn._is_mkldnn_bf16_supported, _is_mkldnn_fp16_supported
    torch.cpu._is_amx_tile_supported
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from amp_graph.dtypes import dtype_name

ASKED = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


def emulates(dtype: torch.dtype) -> bool:
    """Whether this CPU has no kernels for matrix products in a low precision, which then go element
    by element, tens of times slower than in float32 (`scripts/emulation.py`): in bfloat16 on x86
    without AVX-512, say. False where PyTorch does not know, and for other dtypes."""
    if dtype not in ASKED or not torch.backends.mkldnn.is_available():
        return False
    is_supported = getattr(torch.ops.mkldnn, ASKED[dtype], None)
    return is_supported is not None and not is_supported()


def has_amx() -> bool:
    """Whether this CPU has Intel's instructions for products of tiles, and PyTorch uses them."""
    return torch.backends.mkldnn.is_available() and torch.cpu._is_amx_tile_supported()


def why_emulated(dtypes: Iterable[torch.dtype], is_compiled: bool) -> str:
    """Return the warning about products in these precisions; `is_compiled`: by a compiler, which
    emulates none."""
    names = ", ".join(sorted(dtype_name(dtype) for dtype in dtypes if emulates(dtype)))
    others = [dtype_name(dtype) for dtype in ASKED if not emulates(dtype)]
    better = f"It has kernels for {others[0]}. " if others else ""
    setting = 'amp_graph.Policy(emulation="float32"), or AMP_GRAPH_EMULATION=float32'
    if is_compiled:
        setting = 'compiler="eager" and emulation="float32"'
    return (
        f"this CPU has no kernels for products in {names}, which PyTorch emulates. {better}"
        f"With {setting}, float32 kernels compute products in {names}, several times faster"
    )
