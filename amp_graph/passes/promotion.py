"""Promotion: which values still hold full float32, and which operators cannot be low because of it.

    add(embedding, mm)      a sum of float32 and low precision is float32, in PyTorch and here
    add(mm, bias)           so is a sum with a weight
    layer_norm(mm, w, b)    may be low: its kernel computes in float32 anyway

Nodes go by their numbers in graph order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from amp_graph.flow import SUMS, raw_values
from amp_graph.ir import FREE, Color, NodeFacts, Paint
from amp_graph.levels import Level
from amp_graph.passes.analysis import AnalyzedGraph

# Properties of a value, as bits; none if it takes no part in promotion. An exact value holds only
# numbers that every precision has, such as zeros; it is wide, too, as is a sum that begins with it.
# A raw value that something low was added to has moved.
WIDE, LOW, WEIGHT, EXACT, MOVED = 1, 2, 4, 8, 16


@dataclass
class Promotion:
    """The outcome of promotion in one graph.

    wide: the nodes whose values still hold full float32.
    not_low: the infer nodes that may not be low, each with the wide operand that promotes it; None
        if no low value reaches it at all.
    """

    wide: set[int] = field(default_factory=set)
    not_low: dict[int, int | None] = field(default_factory=dict)


def promotion(graph: AnalyzedGraph, painted: Mapping[int, Paint]) -> Promotion:
    """Follow PyTorch's promotion through a graph. At level "max" only the graph's inputs keep their
    digits."""
    colors = [*graph.colors]
    for n, given in painted.items():
        colors[n] = given.color
    if graph.level is Level.MAX:
        raw = raw_values(graph.facts, graph.flow, colors, graph.narrowed)
        return Promotion(raw, {n: None for n in raw if colors[n] is Color.INFER})
    walk = _Walk(graph, colors)
    for n in range(len(colors)):
        walk.visit(n)
    return walk.found


class _Walk:
    """A walk through a graph in its order, which marks wide values.

    - Inputs, weights, float32 results and what is computed from them are wide.
    - If streams are narrowed, a sum with a low value is no longer wide. Exceptions are values that
      moved: a forecast added to the last value, boxes added to where they were, and all that
      follows.
    - A 0-dimensional tensor, an empty one, and a weight of a narrowed node do not promote.
    - Zeros and ones joined with low values (padding) add no digits. They promote at level "safe"
      only, and where float32 arithmetic goes on with the digits. Masks add none to the scores they
      mask.
    - A sum that begins with zeros is wide, unless the zeros were made in the dtype of a low value.
    """

    def __init__(self, graph: AnalyzedGraph, colors: Sequence[Color | None]):
        self.found = Promotion()
        self._graph, self._colors = graph, colors
        self._carried: list[int] = []  # by each node so far
        self._like = {f.like: 0 for f in graph.facts if f.like}  # by those that others are like

    def visit(self, n: int) -> None:
        graph, f, color = self._graph, self._graph.facts[n], self._colors[n]
        is_reached, promoting = self._operands(n)
        has_moved = graph.narrows_streams and self._has_moved(n, is_reached)
        if graph.narrows_streams and is_reached and not has_moved and n not in graph.begin_streams:
            promoting = None
        stays_wide = (promoting is not None or not is_reached) and not self._is_like_low(f)
        if color is Color.INFER and stays_wide:
            self.found.not_low[n] = promoting if is_reached else None
            color = Color.DENY
        bits = WEIGHT if f.is_parameter else 0
        if color is Color.ALLOW or (is_reached and color in FREE):
            bits |= LOW
        if color is not Color.ALLOW and stays_wide:
            bits |= WIDE | (MOVED if has_moved else 0)
            if not f.is_empty:
                self.found.wide.add(n)
        if self._is_exact(n, color):
            bits |= EXACT
        self._carried.append(0 if f.is_scalar or f.is_empty else bits)
        if f.name in self._like:
            self._like[f.name] = self._carried[n]

    def _operands(self, n: int) -> tuple[bool, int | None]:
        """Return whether a low value reaches a node, and the node's first wide operand."""
        graph, moves = self._graph, self._colors[n] is Color.CLEAR
        without = WEIGHT if n in graph.narrowed else 0
        masks = graph.masked.get(n, ())
        is_reached, promoting = False, None
        for operand in graph.flow.predecessors(n):
            bits = self._carried[operand]
            if not bits & without and operand not in masks:
                is_reached = is_reached or bool(bits & LOW)
                is_padding = moves and bits & EXACT and self._may_be_padded(n)
                if promoting is None and bits & WIDE and not is_padding:
                    promoting = operand
        return is_reached, promoting

    def _may_be_padded(self, n: int) -> bool:
        """Whether zeros may be joined with low values in low precision."""
        return self._graph.level is not Level.SAFE and n not in self._graph.digits

    def _has_moved(self, n: int, is_reached: bool) -> bool:
        """Whether a node holds raw values plus something low, and its digits are read."""
        graph, carried = self._graph, self._carried
        operands = [*graph.flow.predecessors(n)]
        has_moved = any(carried[p] & MOVED for p in operands)
        if not is_reached:
            return has_moved
        if self._colors[n] is Color.CLEAR or graph.facts[n].op in SUMS:
            has_moved = has_moved or any(p in graph.raw and carried[p] for p in operands)
        return has_moved and n in graph.digits

    def _is_like_low(self, f: NodeFacts) -> bool:
        """Whether a node is made in the dtype of a low value, and never written to."""
        return bool(f.like) and not f.written and self._like[f.like] & (LOW | WIDE) == LOW

    def _is_exact(self, n: int, color: Color | None) -> bool:
        """Whether a node holds zeros or ones alone: constants that nobody writes to, or moves of
        such."""
        f = self._graph.facts[n]
        if f.written or color is not Color.CLEAR:
            return False
        operands = self._graph.flow.predecessors(n)
        return f.exact or (bool(f.reads) and all(self._carried[p] & EXACT for p in operands))
