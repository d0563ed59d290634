"""Masks: values added to scores so that some of the scores count nothing.

    where(seen, 0, -3.4e38)      zeros.masked_fill(seen, -inf)      (1 - seen) * -3.4e38

A mask holds zeros and ones, and numbers so far from any score that float32 keeps nothing of a score
that is added to one. In bfloat16 it stays the same mask, saturated where it has to be. In float16,
whose largest number a score may come near, that holds only if the far numbers are infinite.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Container, Mapping, Sequence, Set

import networkx as nx
import torch

from amp_graph.dtypes import INTEGERS
from amp_graph.flow import SUMS, is_beyond
from amp_graph.ir import Color, NodeFacts

FAR = 1e8  # neighbours in float32 are 8 apart
MULTIPLICATIONS = frozenset(["aten.mul.Tensor", "aten.mul.Scalar"])
DIFFERENCES = SUMS | {"aten.rsub.Scalar", "aten.sub.Scalar", "aten.add.Scalar"}
WHOLE = INTEGERS | {torch.bool}


class Kind(enum.Enum):
    """The kind of numbers in a value: FEW (zeros and ones), WHOLE (integers of any size), or a
    MASK, which holds FEW and FAR ones."""

    FEW = enum.auto()
    WHOLE = enum.auto()
    MASK = enum.auto()


def masked_scores(
    facts: Sequence[NodeFacts], flow: nx.DiGraph, masks: Set[int], digits: Container[int]
) -> dict[int, Set[int]]:
    """Return the sums of scores and masks, each with its masks. Sums whose `digits` are read are
    left out."""
    sums = {n for mask in masks for n in flow[mask] if facts[n].op in SUMS} - masks
    return {n: masks & {*flow.predecessors(n)} for n in sums if n not in digits}


def filled_scores(
    facts: Sequence[NodeFacts], dtype: torch.dtype, digits: Container[int]
) -> set[int]:
    """Return the clear operators that fill in a constant beyond `dtype`, which saturates and stays
    as far from all other numbers as it was. Operators whose `digits` are read are left out."""
    moving = (n for n, f in enumerate(facts) if f.color is Color.CLEAR and f.reads)
    filled = (n for n in moving if any(is_beyond(x, dtype) for x in facts[n].scalars))
    return {n for n in filled if n not in digits}


def masks_in(
    facts: Sequence[NodeFacts],
    flow: nx.DiGraph,
    by_name: Mapping[str, NodeFacts],
    dtype: torch.dtype,
) -> set[int]:
    """Return the masks of a graph, for one low precision."""
    kinds: dict[int, Kind | None] = {}
    for n, f in enumerate(facts):
        read = {kinds[p] for p in flow.predecessors(n)}
        made_of = {t.dtype for name in f.operands for t in by_name[name].tensors}
        is_of_integers = bool(made_of) and made_of <= WHOLE
        kinds[n] = None if f.written else _kind(f, read, is_of_integers, dtype)
    return {n for n, kind in kinds.items() if kind is Kind.MASK}


def _kind(
    f: NodeFacts, read: Set[Kind | None], is_of_integers: bool, dtype: torch.dtype
) -> Kind | None:
    numbers = {_kind_of_number(x, dtype) for x in f.scalars}
    made_of = read | numbers
    is_constant = not f.operands and (f.is_scalar or f.op != "get_attr")  # its largest is known
    if f.exact:
        return Kind.FEW
    if f.op in MULTIPLICATIONS and Kind.MASK in numbers and read <= {Kind.FEW, Kind.WHOLE}:
        return Kind.MASK
    if is_constant or f.color is Color.CLEAR or f.op in SUMS:
        if Kind.MASK in made_of and made_of <= {Kind.FEW, Kind.MASK}:
            return Kind.MASK
        if made_of == {Kind.FEW} and f.op not in SUMS:
            return Kind.FEW
    if is_of_integers and f.color is Color.CLEAR:
        return Kind.WHOLE
    is_whole = f.op in DIFFERENCES and made_of <= {Kind.FEW, Kind.WHOLE}
    return Kind.WHOLE if is_whole else None


def _kind_of_number(x: float, dtype: torch.dtype) -> Kind | None:
    if math.isinf(x) or (dtype is torch.bfloat16 and abs(x) >= FAR):
        return Kind.MASK
    if x in (-1, 0, 1):
        return Kind.FEW
    return Kind.WHOLE if x.is_integer() else None
