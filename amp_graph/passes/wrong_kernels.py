"""Convolutions that CPUs get wrong in bfloat16, through oneDNN; torch 2.11 to 2.15 (AMX: 2.14).

    a conv3d with a kernel deeper       with AVX512-BF16 the gradient of its weight reads and writes
    than its input, at several depths   other memory: it is NaN, or the process dies
    a stride larger than the width of   likewise, if the kernel is wider than 1: a ResNet at the end
    the input, or a conv3d's height     of which an image is one pixel
    rows of a kernel that hold 64, 96,  with AMX the result has nothing to do with the input, where
    128 ... numbers in all channels     these are even in number and fewer than 16, in each group

The last goes for kernels of one to three dimensions, whatever the strides, the padding and the
number of groups or results; not for dilated ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from amp_graph.cpu import has_amx
from amp_graph.ir import NodeFacts

CONV3D = ("aten.conv3d.default", "aten.conv3d.padding")
CONVOLUTIONS = (
    *CONV3D,
    *(f"aten.conv{d}d.{overload}" for d in (1, 2) for overload in ("default", "padding")),
    "aten.convolution.default",
)


def without_wrong_kernel(f: NodeFacts, operands: Sequence[NodeFacts], dtype: torch.dtype) -> str:
    """Return what a node on a CPU would have to be for its kernel to be right in that precision; ""
    if it is. `operands`: the node's, in order."""
    if dtype is not torch.bfloat16 or f.op not in CONVOLUTIONS:
        return ""
    shapes = [shape for o in operands[:2] if len(shape := o.tensors[0].shape) > 1]  # no bias
    of_input, of_kernel = shapes[0], shapes[-1]  # a node alone, if it is convolved with itself
    if f.op in CONV3D and _is_too_deep(f.tensors[0].shape[-3], of_input[-3], of_kernel[-3]):
        is_known = isinstance(of_input[-3], int)
        return f"{f.op} {'deeper than' if is_known else 'that may be deeper than'} its input"
    if _is_stepped_over(f, of_input, of_kernel):
        return f"{f.op} of strides within its input"
    if has_amx() and _is_wrong_on_amx(of_kernel[1], of_kernel[-1]):
        return f"{f.op} that is right on AMX"
    return ""


def _is_too_deep(depth: int | str, of_input: int | str, of_kernel: int | str) -> bool:
    """Whether the kernel is deeper than its input; with symbolic sizes, whether it may be at
    another depth than the one seen."""
    if of_kernel == 1 or depth == 1:
        return False
    return isinstance(of_input, str) or isinstance(of_kernel, str) or of_input < of_kernel


def _is_stepped_over(
    f: NodeFacts, of_input: Sequence[int | str], of_kernel: Sequence[int | str]
) -> bool:
    """Whether the second window would begin behind the input. A size that is symbolic counts as
    large enough: it is not 1."""
    places = range(-1, -3 if f.op in CONV3D else -2, -1)
    strides = f.strides if len(f.strides) > 1 else f.strides * len(places)
    sizes = [(strides[i], of_input[i], of_kernel[i]) for i in places if -i <= len(strides)]
    return any(
        isinstance(size, int) and size < stride and kernel != 1 for stride, size, kernel in sizes
    )


def _is_wrong_on_amx(channels: int | str, width: int | str) -> bool:
    if isinstance(channels, str) or isinstance(width, str):
        return False
    row = channels * width
    return channels % 2 == 0 and channels < 16 and row > 32 and row % 32 == 0
