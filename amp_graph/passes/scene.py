"""What the rules of paint look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx
import torch

from amp_graph.flow import returned
from amp_graph.ir import Color, Level, NodeFacts, Paint
from amp_graph.oplists import OpLists

Paints = dict[int, Paint]
FREE = (Color.INFER, Color.CLEAR)


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

    @cached_property
    def colors(self) -> Sequence[Color | None]:
        """List colours with the user's overrides. An operator that computes in float32 on
        low-precision tensors is as free as an infer one, unless its result, say of a last softmax,
        is returned, or orders elements, as that of a router does."""
        colors = [f.color for f in self.facts]
        kept = set() if self.level is Level.MAX else {*self.returned, *self._ordered()}
        for n in self.narrowed - kept:
            colors[n] = Color.INFER
        for n, (color, _) in self.overrides.items():
            colors[n] = color
        return colors

    def _ordered(self) -> set[int]:
        """What elements are ordered by, seen through operators that only move numbers."""
        found: set[int] = set()
        ordering = (n for n, f in enumerate(self.facts) if f.orders)
        unseen = [value for n in ordering for value in self.flow.predecessors(n)]
        while unseen:
            value = unseen.pop()
            if value not in found:
                found.add(value)
                if self.facts[value].color is Color.CLEAR:
                    unseen += self.flow.predecessors(value)
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
        on_cpu = any(t.device == "cpu" for f in self.facts for t in f.tensors)
        return self.level is Level.BALANCED and self.dtype is torch.bfloat16 and not on_cpu

    @cached_property
    def returned(self) -> Sequence[int]:
        return returned(self.facts, self.flow)

    @cached_property
    def outputs_in(self) -> Mapping[str, int]:
        """By memory: how many results of the graph live in it."""
        return Counter(self.facts[n].memory for n in self.returned)


Rule = Callable[[Scene, Mapping[int, Paint]], Paints]
NodeRule = Callable[[Scene, int], Paint | None]
