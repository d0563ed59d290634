"""What the rules of paint look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx
import torch

from amp_graph.flow import raw_values, returned, vanishing_constants
from amp_graph.ir import Color, Level, NodeFacts, Paint
from amp_graph.oplists import OpLists

Paints = dict[int, Paint]
FREE = (Color.INFER, Color.CLEAR)
PRODUCTS = frozenset(f"aten.{name}.default" for name in ("linear", "matmul", "mm", "bmm"))
SUMS = frozenset(f"aten.{name}.Tensor" for name in ("add", "add_", "sub", "sub_"))
COORDINATES = 4  # of a place and a time


@dataclass(frozen=True)
class Scene:
    """One graph and what was asked for. Nodes go by their numbers. `flow` has an edge for each
    float32 value and its reader; `overrides` and `saved` have decisions that beat the lists; the
    kernels of `refused` nodes were seen not to take the low precision."""

    facts: Sequence[NodeFacts]
    flow: nx.DiGraph
    lists: OpLists
    dtype: torch.dtype
    level: Level
    overrides: Mapping[int, tuple[Color, str]]
    saved: Mapping[int, Paint]
    refused: Collection[int]

    def operands(self, f: NodeFacts) -> Sequence[NodeFacts]:
        """All nodes that one takes, in order, be they float32 or not."""
        return [self._by_name[name] for name in f.operands]

    def adds_few_terms(self, f: NodeFacts) -> bool:
        """Whether it is a product of few coordinates, by the rows of its first operand."""
        return f.op in PRODUCTS and _is_few(self.operands(f)[0])

    def _moves_places(self, f: NodeFacts) -> bool:
        """Whether it is a product of places, rotations or poses with such, be they 4 x 4, that the
        model computed. With so few terms and results a row it is no more work than arithmetic on
        elements."""
        if not self.adds_few_terms(f) or not _is_few(f):
            return False
        return not any(self._by_name[o.memory].is_parameter for o in self.operands(f))

    @cached_property
    def _by_name(self) -> Mapping[str, NodeFacts]:
        return {f.name: f for f in self.facts}

    @cached_property
    def colors(self) -> Sequence[Color | None]:
        """List colours with the user's overrides. An operator that computes in float32 on
        low-precision tensors is as free as an infer one, unless its result, say of a last softmax,
        is returned, or orders elements, as that of a router does; so is what moves places. What
        saturates is denied where that is seen."""
        colors = [*self._by_lists]
        for n in self.saturating:
            colors[n] = Color.DENY
        for n, (color, _) in self.overrides.items():
            colors[n] = color
        return colors

    @cached_property
    def _by_lists(self) -> Sequence[Color | None]:
        colors = [f.color for f in self.facts]
        kept: set[int] = set()
        if self.level is not Level.MAX:
            ordering = (n for n, f in enumerate(self.facts) if f.orders)
            moved = self._read_by(self._operands_of(ordering), lambda n: colors[n] is Color.CLEAR)
            kept = {*self.returned, *moved}
        for n in self.narrowed - kept:
            colors[n] = Color.INFER
        for n, f in enumerate(self.facts):
            if colors[n] is Color.ALLOW and self._moves_places(f):
                colors[n] = Color.INFER
        return colors

    @cached_property
    def saturating(self) -> Mapping[int, int]:
        """What saturates and could be low, with one who reads how far it is from the bound: float32
        arithmetic, such as a logarithm, what orders elements, or, as an output, code outside of the
        graph; seen through operators that read nothing but such results. A cast before the operator
        costs as much as one after it."""
        colors = self._by_lists
        saturates: set[int] = set()
        made_of: set[int] = set()  # such results and what is computed of them alone
        for n, f in enumerate(self.facts):
            if f.saturates and colors[n] is Color.INFER:
                saturates.add(n)
                made_of.add(n)
            elif colors[n] in FREE and f.reads and made_of.issuperset(self.flow.predecessors(n)):
                made_of.add(n)
        readers = (n for n, f in enumerate(self.facts) if self._reads_bounds(f, colors[n]))
        read = self._read_by(self._operands_of(readers), made_of.difference(saturates).__contains__)
        return {n: reader for n, reader in read.items() if n in saturates}

    @cached_property
    def phases(self) -> Mapping[int, int]:
        """What is read for its phase, with the operator that does, seen through free operators."""
        readers = (n for n, f in enumerate(self.facts) if f.reads_phase)
        return self._read_by(self._operands_of(readers), lambda n: self.colors[n] in FREE)

    @cached_property
    def _raw(self) -> frozenset[int]:
        return frozenset(raw_values(self.facts, self.flow, self.colors, self.narrowed))

    @cached_property
    def displaced(self) -> frozenset[int]:
        """Raw coordinates that the model added something to, and what is computed of them by free
        operators."""
        found: set[int] = set()
        for n, color in enumerate(self.colors):
            if color not in FREE or n in self._raw or n in self.narrowed:
                continue
            if not found.isdisjoint(self.flow.predecessors(n)) or self._adds_to(n, self._raw):
                found.add(n)
        return frozenset(found)

    def _adds_to(self, n: int, places: Container[int]) -> bool:
        """Whether it is a sum of one of these, which is no smaller than the sum, and of more."""
        if self.facts[n].op not in SUMS:
            return False
        size = self.facts[n].numel
        return any(o in places and self.facts[o].numel == size for o in self.flow.predecessors(n))

    @cached_property
    def positions(self) -> Mapping[int, int]:
        """What says where something is, with one who looks there; seen through free operators, but
        those that compute in float32 inside. So is what is computed of such values and full float32
        alone, as the fraction by which neighbours are weighed, and a place that moved on, if places
        are counted from raw coordinates: those of the last step nobody looks at any more."""
        facts, colors = self.facts, self.colors
        pairs = [
            (value, n)
            for n, f in enumerate(facts)
            if f.positions
            for value in self.flow.predecessors(n)
            if facts[value].name in f.positions
        ]
        if not pairs:
            return {}
        read = self._read_by(pairs, lambda n: colors[n] in FREE and n not in self.narrowed)
        of: dict[int, int | None] = {}  # all in full float32: whose position it is, if one's
        counted: set[int] = set()  # of these, from raw coordinates
        for n, f in enumerate(facts):
            operands = [*self.flow.predecessors(n)]
            readers = (of[o] for o in operands if of.get(o) is not None)
            if colors[n] is Color.INFER and n in read:
                of[n] = read[n]
            elif colors[n] is Color.DENY or not (f.reads or f.is_parameter):
                of[n] = None
            elif colors[n] in FREE and all(o in of for o in operands):
                of[n] = next(readers, None)
            elif colors[n] is Color.INFER and self._adds_to(n, counted):
                of[n] = next(readers)
            if of.get(n) is not None and any(o in counted or o in self._raw for o in operands):
                counted.add(n)
        return {n: reader for n, reader in of.items() if reader is not None}

    def _reads_bounds(self, f: NodeFacts, color: Color | None) -> bool:
        if f.orders or f.op == "output":
            return self.level is not Level.MAX
        return color in (Color.DENY, None) and not f.widens  # None: on no list, or with a body

    def _operands_of(self, readers: Iterable[int]) -> Iterator[tuple[int, int]]:
        return ((value, n) for n in readers for value in self.flow.predecessors(n))

    def _read_by(
        self, read: Iterable[tuple[int, int]], passes: Callable[[int], bool]
    ) -> dict[int, int]:
        """All values that are read, each with one who does, seen through operators that pass."""
        found: dict[int, int] = {}
        unseen = [*read]
        while unseen:
            value, reader = unseen.pop()
            if value not in found:
                found[value] = reader
                if passes(value):
                    unseen += ((v, reader) for v in self.flow.predecessors(value))
        return found

    @cached_property
    def narrowed(self) -> frozenset[int]:
        """The nodes whose kernels compute in float32 on tensors that may be low."""
        levels = {level for level in Level if self.level.includes(level)}
        return frozenset(n for n, f in enumerate(self.facts) if f.storage in levels)

    @cached_property
    def narrows_streams(self) -> bool:
        """Whether a sum of float32 and low precision may be low, unlike in PyTorch's promotion:
        not in float16, whose range a stream may outgrow, nor on CPU, where layer norms stay in
        float32 and would each cast it."""
        # A constant of no dimension may be on the CPU in any graph.
        on_cpu = any(t.device == "cpu" for f in self.facts if not f.is_scalar for t in f.tensors)
        return self.level is Level.BALANCED and self.dtype is torch.bfloat16 and not on_cpu

    @cached_property
    def vanishing(self) -> Mapping[int, float]:
        return vanishing_constants(self.facts, self.flow, self.dtype)

    @cached_property
    def returned(self) -> Sequence[int]:
        return returned(self.facts, self.flow)

    @cached_property
    def outputs_in(self) -> Mapping[str, int]:
        """By memory: how many results of the graph live in it."""
        return Counter(self.facts[n].memory for n in self.returned)


def _is_few(f: NodeFacts) -> bool:
    size = f.tensors[0].shape[-1] if f.tensors[0].shape else None
    return isinstance(size, int) and size <= COORDINATES


Rule = Callable[[Scene, Mapping[int, Paint]], Paints]
NodeRule = Callable[[Scene, int], Paint | None]
