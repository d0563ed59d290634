"""Analysis: a graph, what was asked for, and what both together say of its nodes, as the rules of
paint see it. Each answer is worked out when the first rule asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import networkx as nx
import torch

from amp_graph.flow import raw_values, returned, vanishing_constants
from amp_graph.ir import Color, NodeFacts, Paint
from amp_graph.levels import Level
from amp_graph.oplists import OpLists
from amp_graph.passes.demands import (
    asked_for,
    begin_streams,
    displaced,
    norms_of_streams,
    operands_of,
    read_by,
    read_for_digits,
    read_for_phase,
    read_for_position,
    read_near_bounds,
)
from amp_graph.passes.masks import filled_scores, masked_scores, masks_in

Paints = dict[int, Paint]
COORDINATES = 4  # of a place and a time


@dataclass(frozen=True)
class AnalyzedGraph:
    """A graph and what was asked for. Nodes go by their numbers.

    flow: has an edge from each float32 value to each reader.
    overrides, saved: decisions of the user and of a saved plan, which beat the lists.
    refused: nodes whose kernels were seen not to take the low precision.
    """

    facts: Sequence[NodeFacts]
    flow: nx.DiGraph
    lists: OpLists
    dtype: torch.dtype
    level: Level
    overrides: Mapping[int, tuple[Color, str]]
    saved: Mapping[int, Paint]
    refused: Collection[int]

    def operands(self, f: NodeFacts) -> Sequence[NodeFacts]:
        """Return all operands of a node, in order, float32 or not."""
        return [self._by_name[name] for name in f.operands]

    def _moves_places(self, f: NodeFacts) -> bool:
        """Whether a node multiplies positions, rotations or poses (at most 4 x 4) that the model
        computed. With so few terms and results a row such a product is no more work than
        elementwise arithmetic."""
        results = f.tensors[0].shape[-1] if f.tensors[0].shape else None
        if not (adds_few_terms(f) and isinstance(results, int) and results <= COORDINATES):
            return False
        return not any(self._by_name[o.memory].is_parameter for o in self.operands(f))

    @cached_property
    def _by_name(self) -> Mapping[str, NodeFacts]:
        return {f.name: f for f in self.facts}

    @cached_property
    def colors(self) -> Sequence[Color | None]:
        """The colours of the lists, with saturating operators denied where that is seen, and with
        the user's overrides."""
        colors = [*self.colors_by_lists]
        for n in self.saturating:
            colors[n] = Color.DENY
        for n, (color, _) in self.overrides.items():
            colors[n] = color
        return colors

    @cached_property
    def wanted(self) -> Sequence[Color | None]:
        """The `colors`, with those of a saved plan on top."""
        colors = [*self.colors]
        for n, given in self.saved.items():
            colors[n] = given.color
        return colors

    @cached_property
    def colors_by_lists(self) -> Sequence[Color | None]:
        """The colours of the lists. An operator whose kernel computes in float32 on low tensors is
        as free as an infer one, unless its result is returned (a last softmax), orders elements (a
        router), or was asked for in float32 for more than products. So is a product of positions.
        """
        colors = [f.color for f in self.facts]
        kept: set[int] = set()
        if self.level is not Level.MAX:
            ordering = (n for n, f in enumerate(self.facts) if f.orders)
            moved = read_by(
                self.flow, operands_of(self.flow, ordering), lambda n: colors[n] is Color.CLEAR
            )
            kept = {*self.returned, *moved, *asked_for(self, colors)}
        for n in self.narrowed - kept:
            colors[n] = Color.INFER
        for n, f in enumerate(self.facts):
            if colors[n] is Color.ALLOW and self._moves_places(f):
                colors[n] = Color.INFER
        return colors

    saturating = cached_property(read_near_bounds)
    phases = cached_property(read_for_phase)
    positions = cached_property(read_for_position)
    displaced = cached_property(displaced)
    digits = cached_property(read_for_digits)

    @cached_property
    def raw(self) -> frozenset[int]:
        return frozenset(raw_values(self.facts, self.flow, self.colors, self.narrowed))

    @cached_property
    def narrowed(self) -> frozenset[int]:
        """The nodes whose kernels compute in float32 on tensors that may be low."""
        levels = {level for level in Level if self.level.includes(level)}
        nodes = frozenset(n for n, f in enumerate(self.facts) if f.storage in levels)
        return nodes - self.norms_of_streams if self.is_balanced_off_cpu else nodes

    norms_of_streams = cached_property(norms_of_streams)

    @cached_property
    def is_balanced_off_cpu(self) -> bool:
        # A constant of no dimension, or indices, may be on the CPU in any graph.
        tensors = (t for f in self.facts if not f.is_scalar for t in f.tensors)
        on_cpu = any(t.device == "cpu" and t.dtype is torch.float32 for t in tensors)
        return self.level is Level.BALANCED and not on_cpu

    @cached_property
    def narrows_streams(self) -> bool:
        """Whether a sum of float32 and low precision may be low, unlike in PyTorch's promotion. Not
        in float16, whose range a stream may outgrow, nor on CPU, where layer norms stay in float32
        and would each cast it."""
        return self.is_balanced_off_cpu and self.dtype is torch.bfloat16

    begin_streams = cached_property(begin_streams)

    @cached_property
    def masked(self) -> Mapping[int, Set[int]]:
        """The sums of scores and masks that may be as low as the scores, each with its masks."""
        if self.level is Level.SAFE:
            return {}
        masks = masks_in(self.facts, self.flow, self._by_name, self.dtype)
        return masked_scores(self.facts, self.flow, masks, self.digits) if masks else {}

    @cached_property
    def filled(self) -> Set[int]:
        """The operators that fill low scores with a number beyond the low precision's range."""
        if self.level is Level.SAFE or self.dtype is not torch.bfloat16:
            return frozenset()
        return filled_scores(self.facts, self.dtype, self.digits)

    @cached_property
    def vanishing(self) -> Mapping[int, float]:
        return vanishing_constants(self.facts, self.flow, self.dtype)

    @cached_property
    def returned(self) -> Sequence[int]:
        return returned(self.facts, self.flow)

    @cached_property
    def outputs_in(self) -> Mapping[str, int]:
        """How many results of the graph live in each memory."""
        return Counter(self.facts[n].memory for n in self.returned)


def adds_few_terms(f: NodeFacts) -> bool:
    """Whether a node is a product of matrices with few terms: coordinates, rotations, poses."""
    return f.terms is not None and f.terms <= COORDINATES


GraphRule = Callable[[AnalyzedGraph, Mapping[int, Paint]], Paints]
NodeRule = Callable[[AnalyzedGraph, int], Paint | None]
