"""Scale inside: have a graph multiply gradients by S where they come in, and by 1/S where they go
out.

    w_low  = _to_copy(w, dtype=float16)          w_in   = enter(w, s)
    logits = mm(x_low, w_low)                    w_low  = _to_copy(w_in, dtype=float16)
    wide   = _to_copy(logits, dtype=float32)     logits = mm(x_low, w_low)
    return [wide]                                return [leave(logits, s, float32)]
    inputs: x, w                                 inputs: x, w, s, end

For graphs that are compiled (`boundary.inner_scaling`). Either all gradients of a graph are scaled
inside, or none: a value that shares memory with something outside, or is written to there, needs a
boundary that autograd can look into.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from amp_graph.boundary.inner_scaling import ENTER, LEAVE, Inside
from amp_graph.graphs.aten import results_of, storages, tensors_of, written_operands
from amp_graph.graphs.grad_modes import last_casts, mode_after
from amp_graph.ir import NodeFacts

EMBEDDING = torch.ops.aten.embedding.default


def scale_inside(
    module: fx.GraphModule, facts: Mapping[str, NodeFacts], trained: Collection[int]
) -> tuple[fx.GraphModule, Inside | None]:
    """Return the graph with gradients scaled inside, and what crosses its boundary; `module` itself
    and None if not all gradients can be scaled inside.

    trained: positions of the inputs that require gradients. `module` is left as it was.
    """
    crossing = _crossing(module, trained)
    if crossing is None:
        return module, None
    graph = _Rewriting(module, crossing).graph()
    are_parameters = {i: facts[n.name].is_parameter for n, i in crossing.entering.items()}
    inside = Inside(
        tuple(i for i, is_parameter in are_parameters.items() if is_parameter),
        tuple(i for i, is_parameter in are_parameters.items() if not is_parameter),
        tuple(i for i, node in enumerate(results_of(module)) if node in crossing.leaving),
        crossing.devices,
    )
    return fx.GraphModule(module, graph, class_name=type(module).__name__), inside


@dataclass(frozen=True)
class _Crossing:
    """The inputs that gradients go out of, with their positions, and the results that gradients
    come into. `casts`: those that widen a value for nobody else."""

    entering: Mapping[fx.Node, int]
    leaving: Collection[fx.Node]
    casts: Collection[fx.Node]

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The first is one of an input."""
        return tuple(dict.fromkeys(map(_device, chain(self.entering, self.leaving))))


def _crossing(module: fx.GraphModule, trained: Collection[int]) -> _Crossing | None:
    """Return what crosses the graph's boundary; None if something stands in the way."""
    if not torch.is_grad_enabled() or mode_after(module.graph) is False:
        return None
    inputs = module.graph.find_nodes(op="placeholder")
    entering = {n: i for i, n in enumerate(inputs) if i in trained and n.users}
    carrying = _carrying(module, entering)
    if not entering or carrying is None:
        return None
    results = [node for node in results_of(module) if tensors_of(node)]
    leaving = [n for n in dict.fromkeys(results) if n in carrying and _has_gradient(n)]
    crossing = (*entering, *leaving)
    held_by = Counter(key for node in (*inputs, *{*results}) for key in storages(node))
    are_alone = all(held_by[key] == 1 for node in crossing for key in storages(node))
    if not are_alone or not all(map(_is_plain, crossing)):
        return None
    casts = {*last_casts(module)}.intersection(leaving)
    return _Crossing(entering, leaving, casts)


def _carrying(module: fx.GraphModule, entering: Container[fx.Node]) -> Container[fx.Node] | None:
    """Return the nodes that may carry a gradient; None if one of them is written into memory of an
    input."""
    carrying: set[fx.Node] = set()
    filled: set[Any] = set()  # memory that such a value was written into
    outside: set[Any] = set()
    for node in module.graph.nodes:
        if node.op == "placeholder":
            outside.update(storages(node))
        operands = node.all_input_nodes
        if node in entering or not carrying.isdisjoint(operands):
            carrying.add(node)
            filled.update(key for o in written_operands(module, node) for key in storages(o))
        if not filled.isdisjoint(storages(node)):
            carrying.add(node)
    return carrying if filled.isdisjoint(outside) else None


def _device(node: fx.Node) -> torch.device:
    device: torch.device = node.meta["val"].device
    return device


def _has_gradient(node: fx.Node) -> bool:
    dtype = node.meta["val"].dtype
    return bool(dtype.is_floating_point or dtype.is_complex)


def _is_plain(node: fx.Node) -> bool:
    """Whether a value is a tensor of real numbers and of no subclass."""
    value = node.meta["val"]
    return type(value) is FakeTensor and value.is_floating_point()


class _Rewriting:
    """The rewriting of one graph into one that has these crossings inside."""

    def __init__(self, module: fx.GraphModule, crossing: _Crossing):
        self._module, self._crossing = module, crossing
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._scales: dict[torch.device, fx.Node] = {}
        self._ends: list[fx.Node] = []  # until a parameter has taken it

    def graph(self) -> fx.Graph:
        self._take_inputs()
        dropped = self._crossing.casts
        for node in self._module.graph.nodes:
            if node.op not in ("placeholder", "output") and node not in dropped:
                self._copies[node] = self._copied(node)
        self._return_results()
        return self._graph

    def _take_inputs(self) -> None:
        inputs = self._module.graph.find_nodes(op="placeholder")
        for node in inputs:
            self._copies[node] = self._graph.node_copy(node)
        fake = next(n for n in inputs if n in self._crossing.entering).meta["val"].fake_mode
        for i, device in enumerate(self._crossing.devices):
            self._scales[device] = self._number(f"amp_graph_scale_{i}", fake, device)
        self._ends = [self._number("amp_graph_end", fake, self._crossing.devices[0])]
        for node in self._crossing.entering:
            if not all(map(_looks_up, node.users)):
                self._copies[node] = self._entered(self._copies[node], node)

    def _number(self, name: str, fake: Any, device: torch.device) -> fx.Node:
        node = self._graph.placeholder(name)
        with fake:
            node.meta["val"] = torch.empty((), dtype=torch.float32, device=device)
        return node

    def _copied(self, node: fx.Node) -> fx.Node:
        copy = self._graph.node_copy(node, self._copies.__getitem__)
        if not _looks_up(node) or node.all_input_nodes[0] not in self._crossing.entering:
            return copy
        entered = self._copies[node.all_input_nodes[0]]
        if entered.target is ENTER:  # for its other readers
            copy.replace_input_with(entered, entered.all_input_nodes[0])
        return self._entered(copy, node)

    def _entered(self, value: fx.Node, like: fx.Node) -> fx.Node:
        ends = self._ends if like.meta.get("is_parameter") or like.target is EMBEDDING else []
        entered = self._graph.call_function(ENTER, (value, self._scales[_device(like)], *ends))
        entered.meta = {"val": like.meta["val"]}
        ends.clear()
        return entered

    def _return_results(self) -> None:
        left = {node: self._left(node) for node in self._crossing.leaving}
        copies: dict[Any, fx.Node] = self._copies | left
        self._graph.output(tuple(copies.get(r, r) for r in results_of(self._module)))

    def _left(self, node: fx.Node) -> fx.Node:
        value = node.all_input_nodes[0] if node in self._crossing.casts else node
        args = self._copies[value], self._scales[_device(node)], node.meta["val"].dtype
        left = self._graph.call_function(LEAVE, args)
        left.meta = dict(node.meta)
        return left


def _looks_up(node: fx.Node) -> bool:
    """Whether a node only looks entries of its first operand up. The gradients of what it found are
    fewer numbers than the gradient of the whole operand."""
    return node.target is EMBEDDING
