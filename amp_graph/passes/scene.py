"""What the rules of paint look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import networkx as nx
import torch

from amp_graph.flow import returned
from amp_graph.ir import Color, Level, NodeFacts, Paint
from amp_graph.oplists import OpLists

Facts = Mapping[str, NodeFacts]
Overrides = Mapping[str, tuple[Color, str]]
Paints = dict[str, Paint]
FREE = (Color.INFER, Color.CLEAR)


@dataclass(frozen=True)
class Scene:
    """One graph and what was asked for. `flow` has an edge for each float32 value and its reader;
    `overrides` and `saved` have decisions that beat the lists; the kernels of `refused` nodes were
    seen not to take the low precision."""

    facts: Facts
    flow: nx.DiGraph
    lists: OpLists
    dtype: torch.dtype
    level: Level
    overrides: Overrides
    saved: Mapping[str, Paint]
    refused: Collection[str]

    @cached_property
    def colors(self) -> Mapping[str, Color | None]:
        """List colours with the user's overrides. An operator that computes in float32 on
        low-precision tensors is as free as an infer one, unless its result, say of a last softmax,
        is returned, or orders elements, as that of a router does."""
        colors = {name: f.color for name, f in self.facts.items()}
        kept = () if self.level is Level.MAX else {*returned(self.facts), *self._ordered()}
        colors |= dict.fromkeys(self.narrowed.difference(kept), Color.INFER)
        return colors | {name: color for name, (color, _) in self.overrides.items()}

    def _ordered(self) -> set[str]:
        """What elements are ordered by, seen through operators that only move numbers."""
        found: set[str] = set()
        open_names = [name for f in self.facts.values() if f.orders for name in f.reads]
        while open_names:
            name = open_names.pop()
            if name not in found:
                found.add(name)
                if self.facts[name].color is Color.CLEAR:
                    open_names += self.facts[name].reads
        return found

    @cached_property
    def narrowed(self) -> frozenset[str]:
        """The nodes whose kernels compute in float32 on tensors that may be low."""
        levels = {level for level in Level if self.level.includes(level)}
        return frozenset(name for name, f in self.facts.items() if f.storage in levels)

    @cached_property
    def narrows_streams(self) -> bool:
        """Whether a sum of float32 and low precision may be low, unlike in PyTorch's promotion:
        not in float16, whose range a stream may outgrow, nor on CPU, where layer norms stay in
        float32 and would each cast it."""
        on_cpu = any(t.device == "cpu" for f in self.facts.values() for t in f.tensors)
        return self.level is Level.BALANCED and self.dtype is torch.bfloat16 and not on_cpu

    @cached_property
    def outputs_in(self) -> Mapping[str, int]:
        """By memory: how many results of the graph live in it."""
        return Counter(self.facts[name].memory for name in returned(self.facts))


Rule = Callable[[Scene, Mapping[str, Paint]], Paints]
NodeRule = Callable[[Scene, NodeFacts], Paint | None]
