"""A graph that is run node by node, each of them shown, those of bodies inside of it too.

Random operators are seeded by their names, so that two runs draw the same numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx, nn
from torch._ops import OpOverload

from amp_graph.backend.emulation import in_float32
from amp_graph.backend.wide_state import wide_state
from amp_graph.graphs.aten import CHECKPOINT, COND, CUSTOM_FUNCTION, get_attribute

SEED = 0
ENTERED = (CHECKPOINT, COND, CUSTOM_FUNCTION)


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


class WatchedGraph(fx.Interpreter):
    """Runs one graph and shows every node, with its place. `emulated`: which nodes are computed
    `in_float32`."""

    def __init__(
        self,
        module: fx.GraphModule,
        place: Place,
        show: Callable[[Place, fx.Node, Any], None],
        emulated: Callable[[fx.Node], bool],
    ):
        super().__init__(module)
        self.place, self.show, self.emulated = place, show, emulated
        self.extra_traceback = False  # in the message of an error

    def run_node(self, n: fx.Node) -> Any:
        if isinstance(n.target, OpOverload) and torch.Tag.nondeterministic_seeded in n.target.tags:
            # Casts draw none, but orders may differ.
            torch.manual_seed(SEED + zlib.crc32(n.name.encode()))
        computed = in_float32(cast(Any, n.target)) if self.emulated(n) else wide_state(n)
        if computed is not None:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            value = computed(*args, **kwargs)
        else:
            value = self._run_inside(n) if n.target in ENTERED else super().run_node(n)
        self.show(self.place.at(n), n, value)
        return value

    def _run_inside(self, n: fx.Node) -> Any:
        """Run a higher-order operator with its bodies watched, but for the backward body of a
        custom function."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.target is CHECKPOINT:
            return self._body(n.args[0]).run(*args[1:])
        if n.target is COND:
            condition, _, _, operands = args
            return self._body(n.args[1] if condition else n.args[2]).run(*operands)
        return n.target(_as_module(self._body(n.args[0])), *args[1:], **kwargs)  # type: ignore[operator]

    def _body(self, node: Any) -> WatchedGraph:
        name, place = str(node.target), self.place
        inner = Place(place.call, place.graph, f"{place.body}{name}/", "")
        return WatchedGraph(get_attribute(self.module, name), inner, self.show, self.emulated)


class _Run(nn.Module):
    def __init__(self, watched: WatchedGraph):
        super().__init__()
        self.run = watched.run

    def forward(self, *args: Any) -> Any:
        return self.run(*args)


def _as_module(watched: WatchedGraph) -> fx.GraphModule:
    """A graph of one node, which runs all that is watched."""
    graph = fx.Graph()
    body = cast(fx.GraphModule, watched.module)
    inputs = [graph.placeholder(n.name) for n in body.graph.find_nodes(op="placeholder")]
    graph.output(graph.call_module("run", tuple(inputs)))
    return fx.GraphModule({"run": _Run(watched)}, graph)
