"""Who looks at the numbers of a run, and at which place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True)
class Place:
    """One node in one run of a graph: the how-manieth graph of the call, the plan of the graph
    or body that the node is in, and its name. `call` tells repeated runs of one graph apart."""

    call: int
    graph: int
    body: str
    name: str

    def at(self, node: fx.Node) -> Place:
        """That of another node of the same graph."""
        return replace(self, name=node.name)


class Observer:
    """Is shown every value of a run and, in backward, every gradient."""

    def value(self, place: Place, node: fx.Node, value: Any) -> None:
        """`value` is what the node returned."""

    def gradient(self, place: Place, gradient: torch.Tensor) -> None:
        """`gradient` is that of the node's value, complete, as the engine computed it; dense."""
