"""Kernels of the CPU that compute in float32 on low-precision tensors: what they round."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from amp_graph.levels import Level
from amp_graph.oplists import load_lists


def gradient_errors(
    op: str, function: Callable[..., Tensor], *shapes: tuple[int, ...]
) -> list[float]:
    """Of a result and its gradients in bfloat16, against float64; weights as the lists say."""
    weights = load_lists().entries[op].low_args.get("cpu") and torch.float32
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(s, generator=generator).bfloat16() for s in shapes]
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        rest = weights if weights and dtype is torch.bfloat16 else dtype
        dtypes = [dtype, *(rest for _ in values[1:])]
        leaves = [v.to(d, copy=True).requires_grad_() for v, d in zip(values, dtypes, strict=True)]
        result = function(*leaves)
        arriving = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        result.backward(arriving.to(dtype))
        found.append([t.double() for t in (result.detach(), *(leaf.grad for leaf in leaves))])
    return [float((a - b).norm() / b.norm()) for a, b in zip(*found, strict=True)]


def resized(x: Tensor, times: float, mode: str) -> Tensor:
    return F.interpolate(x, scale_factor=times, mode=mode)


ROWS = (4096, 64)
KERNELS = {
    "aten.layer_norm": (lambda x, w, b: F.layer_norm(x, (64,), w, b), ROWS, (64,), (64,)),
    "aten.rms_norm": (lambda x, w: F.rms_norm(x, (64,), w), ROWS, (64,)),
    "aten.group_norm": (lambda x, w, b: F.group_norm(x, 4, w, b), (64, 16, 64), (16,), (16,)),
    "aten.softmax": (lambda x: F.softmax(x, -1), ROWS),
    "aten._safe_softmax": (lambda x: torch.ops.aten._safe_softmax(x, -1), ROWS),
    "aten.var": (lambda x: x.var(0), ROWS),
    "aten.std": (lambda x: x.std(0), ROWS),
    "aten.upsample_linear1d": (lambda x: resized(x, 16, "linear"), (4, 8, 64)),
    "aten.upsample_bilinear2d": (lambda x: resized(x, 2, "bilinear"), (2, 8, 32, 32)),
    "aten.upsample_trilinear3d": (lambda x: resized(x, 4, "trilinear"), (2, 4, 8, 8, 8)),
    "aten.square": (lambda x: x.square(), ROWS),
    "aten.pow.Tensor_Scalar": (lambda x: x.pow(3), ROWS),
}


@pytest.mark.parametrize("op", KERNELS)
def test_kernels_on_cpu_round_once_and_no_more(op):
    """One rounding to bfloat16 is an error of 0.17 %; a sum in bfloat16 one of percents."""
    function, *shapes = KERNELS[op]
    is_accurate = max(gradient_errors(op, function, *shapes)) < 4e-3
    level = load_lists().entries[op].storage_on("cpu", torch.bfloat16)
    assert is_accurate is (op != "aten.layer_norm")  # if that changes, it may be "balanced" too
    assert is_accurate or level is Level.MAX


def test_every_operator_that_may_be_low_at_the_default_level_was_measured():
    aliases = {"native_layer_norm", "native_group_norm", "_fused_rms_norm", "_softmax"}
    aliases |= {"special_softmax", "native_batch_norm", "batch_norm"}
    listed = {
        n
        for n, e in load_lists().entries.items()
        if e.storage_on("cpu", torch.bfloat16) is Level.BALANCED
    }
    assert listed - {f"aten.{a}" for a in aliases} <= KERNELS.keys()


def test_products_of_sparse_tensors_add_up_in_low_precision() -> None:
    """Which is why code with sparse tensors, which no graph takes, stays in float32."""
    entries = (torch.rand(4, 8000, generator=torch.Generator().manual_seed(0)) < 1 / 8).float()
    ones = torch.ones(8000, 1)
    low = torch.mm(entries.to_sparse().bfloat16(), ones.bfloat16()).float()
    assert torch.equal(low, torch.full((4, 1), 256.0)) and (entries @ ones).min() > 900
    assert torch.equal(entries.bfloat16() @ ones.bfloat16(), (entries @ ones).bfloat16())
