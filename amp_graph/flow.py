"""The flow graph: which node computes on which node's float32 values, and what flows in it.

Nodes go by their numbers in graph order here and in the stages that decide, which visit all of them
many times: what is kept by number lies in memory in the order of the visits. By name it lies
scattered, and a node of a graph too large for the processor's caches costs up to twice as much.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import networkx as nx
import torch

from amp_graph.ir import FREE, Color, NodeFacts, Paint


def flow_graph(facts: Mapping[str, NodeFacts]) -> nx.DiGraph:
    """A directed graph over node numbers, an edge from each value to each of its readers.

    Nodes stand in graph order, which is a topological order; predecessors as in `reads`.
    """
    number = {name: n for n, name in enumerate(facts)}
    flow = nx.DiGraph()
    flow.add_nodes_from(number.values())
    readers = zip(number.values(), facts.values(), strict=True)
    flow.add_edges_from((number[value], n) for n, f in readers for value in f.reads)
    return flow


def returned(facts: Sequence[NodeFacts], flow: nx.DiGraph) -> list[int]:
    """The nodes whose float32 values the graph returns."""
    ends = (n for n, f in enumerate(facts) if f.op == "output")
    return [value for n in ends for value in flow.predecessors(n)]


def huge_values(
    facts: Sequence[NodeFacts],
    flow: nx.DiGraph,
    colors: Sequence[Color | None],
    dtype: torch.dtype,
) -> set[int]:
    """What carries a finite constant beyond the low precision's range, until something bounds
    it. What is filled with one is as bounded as that."""
    huge: set[int] = set()
    for n, f in enumerate(facts):
        carries = any(is_beyond(x, dtype) for x in f.scalars)
        if huge and not (carries or f.bounded):
            carries = any(p in huge for p in flow.predecessors(n))
        if carries and colors[n] is not Color.ALLOW:
            huge.add(n)
    return huge


def is_beyond(number: float, dtype: torch.dtype) -> bool:
    """Whether it is finite and beyond the range of a precision."""
    return torch.finfo(dtype).max < abs(number) < math.inf


def vanishing_constants(
    facts: Sequence[NodeFacts], flow: nx.DiGraph, dtype: torch.dtype
) -> dict[int, float]:
    """Constants of which no number but 0 is as large as the low precision's smallest normal one,
    with the largest of each; and what only moves their numbers."""
    limit = torch.finfo(dtype).smallest_normal
    vanishing: dict[int, float] = {}
    for n, f in enumerate(facts):
        if f.reads:
            moved = [vanishing.get(p, limit) for p in flow.predecessors(n)]
            largest = max(moved) if f.color is Color.CLEAR else limit
        else:
            largest = max(map(abs, f.scalars), default=0)
        if 0 < largest < limit:
            vanishing[n] = largest
    return vanishing


# What a value carries, as bits. Nothing, if it takes no part in promotion. What is exact holds only
# numbers that every precision has, such as zeros; it is wide too, as a sum that begins with it. A
# raw value that something low was added to has moved.
WIDE, LOW, WEIGHT, EXACT, MOVED = 1, 2, 4, 8, 16

SUMS = frozenset(f"aten.{name}.Tensor" for name in ("add", "add_", "sub", "sub_"))


class Narrowing(NamedTuple):
    """Residual streams may be low, but for what norms `begin` them with, and for what is in
    `digits` and follows from `raw` values that something low was added to."""

    raw: Container[int]
    digits: Container[int]
    begin: Container[int]


def wide_values(
    facts: Sequence[NodeFacts],
    flow: nx.DiGraph,
    colors: Sequence[Color | None],
    narrowed: Container[int],
    streams: Narrowing | None,
    masked: Mapping[int, Container[int]],
) -> tuple[set[int], dict[int, int | None]]:
    """The nodes whose values still hold full float32; and the infer nodes that may not be low, each
    with the wide operand that promotes it, or None if nothing low reaches it at all.

    Inputs, weights, float32 results and what is computed from them are wide; beside something low
    no longer, if `streams` are narrowed; but a forecast that is added to the last value, boxes to
    where they were, and what follows of it goes on to be. A 0-dimensional tensor takes no part in
    promotion, nor does one without elements, or a weight of a `narrowed` node, whose kernel
    computes in float32 anyway. Zeros and ones that low values are joined with, as padding, add no
    digits to them; a sum that begins with zeros is wide, unless they were made like something low,
    which PyTorch would make low. Nor do masks to the scores that are `masked` with them.
    """
    wide: set[int] = set()
    not_low: dict[int, int | None] = {}
    carried: list[int] = []
    likened = {f.like: 0 for f in facts if f.like}  # what they carry
    for n, f in enumerate(facts):
        reads_weights, masks = n not in narrowed, masked.get(n, ())
        moves = colors[n] is Color.CLEAR
        reached, wide_operand = False, None
        for operand in flow.predecessors(n):
            bits = carried[operand]
            if (reads_weights or not bits & WEIGHT) and operand not in masks:
                reached = reached or bool(bits & LOW)
                if wide_operand is None and bits & WIDE and not (moves and bits & EXACT):
                    wide_operand = operand
        moved = streams is not None and any(carried[p] & MOVED for p in flow.predecessors(n))
        if reached and streams is not None:
            if moves or f.op in SUMS:
                moved = moved or any(p in streams.raw and carried[p] for p in flow.predecessors(n))
            moved = moved and n in streams.digits
            if not moved and n not in streams.begin:
                wide_operand = None
        stays_wide = wide_operand is not None or not reached
        if f.like and not f.written and likened[f.like] & (LOW | WIDE) == LOW:
            stays_wide = False
        color = colors[n]
        if color is Color.INFER and stays_wide:
            not_low[n] = wide_operand if reached else None
            color = Color.DENY
        bits = WEIGHT if f.is_parameter else 0
        if color is Color.ALLOW or (reached and color in FREE):
            bits |= LOW
        if color is not Color.ALLOW and stays_wide:
            bits |= WIDE
            if not f.is_empty:
                wide.add(n)
            if moved:
                bits |= MOVED
        if _is_exact(f, color, (carried[p] for p in flow.predecessors(n))):
            bits |= EXACT
        carried.append(0 if f.is_scalar or f.is_empty else bits)
        if f.name in likened:
            likened[f.name] = carried[n]
    return wide, not_low


def _is_exact(f: NodeFacts, color: Color | None, carried: Iterable[int]) -> bool:
    """Zeros that nobody writes to, and what moves nothing else."""
    if f.written or color is not Color.CLEAR:
        return False
    return f.exact or (bool(f.reads) and all(bits & EXACT for bits in carried))


def raw_values(
    facts: Sequence[NodeFacts],
    flow: nx.DiGraph,
    colors: Sequence[Color | None],
    narrowed: Container[int],
) -> set[int]:
    """What is computed of the graph's inputs, buffers and constants alone: of no parameter, but for
    those of a `narrowed` node, such as a norm of the inputs, and behind no allow node. It may hold
    times, counts, coordinates or indices, which a low precision does not tell apart."""
    raw: set[int] = set()
    for n, f in enumerate(facts):
        if f.is_parameter or colors[n] is Color.ALLOW:
            continue
        operands = flow.predecessors(n)
        if n in narrowed:
            operands = (o for o in operands if not facts[o].is_parameter)
        if raw.issuperset(operands):
            raw.add(n)
    return raw


Node = TypeVar("Node", contravariant=True)  # what stands for a node: its name or its number
Known = TypeVar("Known", covariant=True)


class Table(Protocol[Node, Known]):
    """What is known of each node."""

    def __getitem__(self, node: Node, /) -> Known: ...


def takes_either(
    facts: Table[Node, NodeFacts],
    paints: Table[Node, Paint],
    value: Node,
    reader: Node,
    reads: Iterable[Node],
    is_low: bool = False,
) -> bool:
    """Whether `reader`, low or not, which reads `reads`, needs no cast of `value`, one of them, as
    its kernel widens operands itself.

    A reduction in float32 reads low values if it is asked for a float32 result. Of operators that
    promote, a 0-dimensional operand beside larger ones does not decide the result's type, and a
    float32 operator that reads float32 anyway, or a wide value, which may not arrive rounded there,
    takes a low operand beside it, as in a residual stream.
    """
    if facts[reader].widens:
        return not (is_low or paints[value].wide or paints[reader].color is Color.KEEP)
    if not facts[reader].promotes:
        return False
    others = [o for o in reads if o != value and not facts[o].is_scalar]
    if facts[value].is_scalar:
        return bool(others) and (is_low or not paints[value].wide)
    if paints[reader].color is not Color.DENY or paints[value].wide:
        return False
    return any(paints[o].color in (Color.DENY, Color.KEEP) or paints[o].wide for o in others)


def widened_for_others(
    facts: Mapping[str, NodeFacts], paints: Mapping[str, Paint], low: Container[str]
) -> set[str]:
    """The low values that some operator needs in float32. Who would take either reads the cast as
    well: else its gradient would be rounded by itself, in a cast of its own, before it is added to
    the others. Not so a 0-dimensional value, of which nothing is gained, or one that is written to
    and so may have to be cast again."""
    return {
        value
        for name, f in facts.items()
        if name not in low and f.op not in ("output", "getitem")
        for value in f.reads
        if value in low
        and not (facts[value].is_scalar or facts[value].written)
        and not takes_either(facts, paints, value, name, f.reads)
    }
