"""The flow graph: which node computes on which node's float32 values, and what flows in it.

Nodes go by their numbers in graph order here and in the stages that decide, which visit all of them
many times: what is kept by number lies in memory in the order of the visits. By name it lies
scattered, and a node of a graph too large for the processor's caches costs up to twice as much.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import networkx as nx
import torch

from amp_graph.ir import Color, NodeFacts, Paint

SUMS = frozenset(f"aten.{name}.Tensor" for name in ("add", "add_", "sub", "sub_"))


def flow_graph(facts: Mapping[str, NodeFacts]) -> nx.DiGraph:
    """Return a directed graph over node numbers, with an edge from each value to each of its
    readers.

    Nodes stand in graph order, which is a topological order; predecessors as in `reads`.
    """
    number = {name: n for n, name in enumerate(facts)}
    flow = nx.DiGraph()
    flow.add_nodes_from(number.values())
    readers = zip(number.values(), facts.values(), strict=True)
    flow.add_edges_from((number[value], n) for n, f in readers for value in f.reads)
    return flow


def returned(facts: Sequence[NodeFacts], flow: nx.DiGraph) -> list[int]:
    """Return the nodes whose float32 values the graph returns."""
    ends = (n for n, f in enumerate(facts) if f.op == "output")
    return [value for n in ends for value in flow.predecessors(n)]


def huge_values(
    facts: Sequence[NodeFacts],
    flow: nx.DiGraph,
    colors: Sequence[Color | None],
    dtype: torch.dtype,
) -> set[int]:
    """Return the nodes that carry a finite constant beyond the low precision's range, until
    something bounds it. A value filled with such a constant is as bounded as the constant."""
    huge: set[int] = set()
    for n, f in enumerate(facts):
        carries = any(is_beyond(x, dtype) for x in f.scalars)
        if huge and not (carries or f.bounded):
            carries = any(p in huge for p in flow.predecessors(n))
        if carries and colors[n] is not Color.ALLOW:
            huge.add(n)
    return huge


def is_beyond(number: float, dtype: torch.dtype) -> bool:
    """Whether a number is finite and beyond the range of a precision."""
    return torch.finfo(dtype).max < abs(number) < math.inf


def saturated(argument: Any, dtype: torch.dtype) -> Any:
    """Return an argument for an operator that is to run in a precision: the largest number of that
    precision for a finite number beyond it."""
    if isinstance(argument, float) and is_beyond(argument, dtype):
        return math.copysign(torch.finfo(dtype).max, argument)
    return argument


def vanishing_constants(
    facts: Sequence[NodeFacts], flow: nx.DiGraph, dtype: torch.dtype
) -> dict[int, float]:
    """Return the constants whose nonzero numbers are all below the smallest normal number of
    `dtype`, and the values that only move such numbers, each with its largest number."""
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


def raw_values(
    facts: Sequence[NodeFacts],
    flow: nx.DiGraph,
    colors: Sequence[Color | None],
    narrowed: Container[int],
) -> set[int]:
    """Return the values that depend on inputs, buffers and constants only.

    A value is not raw if it depends on an allowed operator, or on a parameter, unless a `narrowed`
    node reads that (a norm of the inputs). Raw values may be times, counts, coordinates or indices,
    which a low precision does not tell apart.
    """
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
    """A lookup by node."""

    def __getitem__(self, node: Node, /) -> Known: ...


def takes_either(
    facts: Table[Node, NodeFacts],
    paints: Table[Node, Paint],
    value: Node,
    reader: Node,
    reads: Iterable[Node],
    is_low: bool = False,
) -> bool:
    """Whether `reader` needs no cast of `value`, one of `reads`, because its kernel widens operands
    itself.

    A reduction in float32 reads low values if it is asked for a float32 result. In operators that
    promote, a 0-dimensional operand beside larger ones does not decide the result's type. A float32
    operator that reads another float32 operand, or a wide value, takes a low operand beside it, as
    in a residual stream; a wide value itself may not arrive rounded.

    is_low: whether the reader computes in low precision.
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
    """Return the low values that some operator needs in float32.

    A reader that takes either precision reads the same cast, so that its gradient is added in
    float32 and not rounded first. Left out are 0-dimensional values, where nothing is gained, and
    values that are written to, which may have to be cast again.
    """
    return {
        value
        for name, f in facts.items()
        if name not in low and f.op not in ("output", "getitem")
        for value in f.reads
        if value in low
        and not (facts[value].is_scalar or facts[value].written)
        and not takes_either(facts, paints, value, name, f.reads)
    }
