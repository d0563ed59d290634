"""How many terms the sums of a matrix product have, whatever operator spells it.

    a (..., rows, terms) @ b (..., terms, columns)

There are few where the product moves places, as by a rotation, and many where a layer makes
features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from amp_graph.graphs.aten import arguments
from amp_graph.graphs.fake import UNKNOWN_SIZE

aten = torch.ops.aten
# Operators, and their arguments for a.
FACTORS: dict[Any, str] = {
    aten.linear: "input",
    aten.matmul: "self",
    aten.linalg_matmul: "self",
    aten.mm: "self",
    aten.bmm: "self",
    aten.addmm: "mat1",
    aten.addbmm: "batch1",
    aten.baddbmm: "batch1",
}


def terms_of(node: fx.Node) -> int | None:
    """Return the terms of a product of two tensors; None for any other node."""
    if not isinstance(node.target, OpOverload):
        return None
    packet = node.target.overloadpacket
    if packet is aten.einsum:
        return _of_einsum(**arguments(node))
    if packet not in FACTORS:
        return None
    return _shape(arguments(node)[FACTORS[packet]])[-1]


def contracted(equation: str) -> set[str]:
    """Return the indices of an einsum that several operands have, and that are summed over."""
    spelled, arrow, result = equation.replace(" ", "").partition("->")
    indices, operands = {*filter(str.isalpha, spelled)}, spelled.split(",")
    kept = {*result} if arrow else {i for i in indices if spelled.count(i) == 1}
    return {i for i in indices - kept if sum(i in each for each in operands) > 1}


def _of_einsum(equation: str, tensors: Sequence[fx.Node], path: Any = None) -> int | None:
    if len(tensors) != 2:
        return None
    operands = equation.replace(" ", "").partition("->")[0].split(",")
    a, b = (_sizes(*each) for each in zip(operands, map(_shape, tensors), strict=True))
    return math.prod(max(a[i], b[i]) for i in contracted(equation))  # einsum expands what is one


def _sizes(indices: str, shape: Sequence[int]) -> Mapping[str, int]:
    """Return the size of each index. Indices that three dots stand for are never summed over."""
    front, _, back = indices.partition("...")
    named = (*shape[: len(front)], *shape[len(shape) - len(back) :])
    return dict(zip((*front, *back), named, strict=True))


def _shape(operand: fx.Node) -> Sequence[int]:
    shape = operand.meta["val"].shape
    return [size if isinstance(size, int) else UNKNOWN_SIZE for size in shape]
