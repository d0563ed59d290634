"""Matrix products by their sizes, whatever operator spells them.

    a (..., rows, terms) @ b (..., terms, columns)

The terms of each sum are few where the product moves places, as by a rotation, and many where a
layer makes features.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from amp_graph.capture.aten import arguments
from amp_graph.capture.fake import UNKNOWN_SIZE
from amp_graph.ir import Product

aten = torch.ops.aten
# Operators, and their arguments for a and b.
FACTORS: dict[Any, tuple[str, str]] = {
    aten.linear: ("input", "weight"),
    aten.matmul: ("self", "other"),
    aten.linalg_matmul: ("self", "other"),
    aten.mm: ("self", "mat2"),
    aten.bmm: ("self", "mat2"),
    aten.addmm: ("mat1", "mat2"),
    aten.addbmm: ("batch1", "batch2"),
    aten.baddbmm: ("batch1", "batch2"),
}
Sizes = Mapping[Hashable, int]  # by the index that runs over each


def product_of(node: fx.Node) -> Product | None:
    """The sizes of a product of two tensors; None for any other node."""
    if not isinstance(node.target, OpOverload):
        return None
    packet = node.target.overloadpacket
    if packet is aten.einsum:
        return _of_einsum(**arguments(node))
    if packet not in FACTORS:
        return None
    given = arguments(node)
    a, b = (_shape(given[name]) for name in FACTORS[packet])
    weight = ("terms",) if len(b) == 1 else ("terms", "columns")
    return _product(
        _sizes(a, ("terms",) if len(a) == 1 else ("rows", "terms")),
        _sizes(b, weight if packet is not aten.linear else weight[::-1]),
        {"terms"},
    )


def _of_einsum(equation: str, tensors: Any, path: Any = None) -> Product | None:
    """Of two operands; three dots stand for the same in both."""
    operands, arrow, result = equation.replace(" ", "").partition("->")
    spelled = operands.split(",")
    if len(spelled) != 2:
        return None
    sizes: list[Sizes] = []
    for indices, tensor in zip(spelled, tensors, strict=True):
        shape = _shape(tensor)
        front, dots, back = indices.partition("...")
        batch = range(len(front) + len(back) - len(shape), 0) if dots else ()
        sizes.append(dict(zip((*front, *batch, *back), shape, strict=True)))
    a, b = sizes
    letters = {index for index in {*a, *b} if isinstance(index, str)}
    kept = {*result} if arrow else {i for i in letters if operands.count(i) == 1}
    return _product(a, b, letters & {*a} & {*b} - kept)


def _product(a: Sizes, b: Sizes, summed: set[Any]) -> Product:
    def alone(one: Sizes, other: Sizes) -> int:
        """How many elements of the result read the same of the other operand."""
        return math.prod(n for i, n in one.items() if other.get(i, 1) == 1 and i not in summed)

    terms = math.prod(max(a[i], b[i]) for i in summed)  # of which einsum expands what is one
    return Product(terms, min(alone(a, b), alone(b, a)))


def _sizes(shape: Sequence[int], matrix: Sequence[str]) -> Sizes:
    """Of a batch of matrices or vectors, whose own indices are given."""
    batch = range(len(matrix) - len(shape), 0)
    return dict(zip((*batch, *matrix), shape, strict=True))


def _shape(operand: Any) -> Sequence[int]:
    shape = operand.meta["val"].shape
    return [size if isinstance(size, int) else UNKNOWN_SIZE for size in shape]
