"""Who looks at the numbers of a run, and at which place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True)
class Place:
    """A node in one run of a graph.

    call: the position of this run among the graphs that the call ran, which tells repeated runs of
        one graph apart.
    graph, body: the graph, and the body inside it, whose plan has the node.
    name: the node's.
    """

    call: int
    graph: int
    body: str
    name: str

    def at(self, node: fx.Node) -> Place:
        """Return the place of another node of the same graph."""
        return replace(self, name=node.name)


class Observer:
    """Is shown every value of a run and, in backward, every gradient."""

    def value(self, place: Place, node: fx.Node, value: Any) -> None:
        """`value` is what the node returned."""

    def gradient(self, place: Place, gradient: torch.Tensor) -> None:
        """`gradient` is that of the node's value, complete, as the engine computed it; dense."""
