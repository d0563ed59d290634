"""Cut a graph into parts, each of which takes results of those before it.

    h = linear(x, w)                 part 0:  h = linear(x, w)
    u = tanh(h)              ->               return h
    return h, u                      part 1:  u = tanh(h)
                                              return u

Every part begins and ends in the modes in which the whole begins: modes that are on at a cut
(recording, autocast regions of the model's own) are put back before it, and on again after it.

Private names of PyTorch used here:

    torch._dynamo.source.ConstantSource, Node._dynamo_source   where an input comes from, which
        AOTAutograd asks of every input
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource

from amp_graph.errors import CaptureError
from amp_graph.graphs.aten import (
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    SET_GRAD_ENABLED,
    get_attribute,
    results_of,
    set_attribute,
)
from amp_graph.graphs.grad_modes import INFERENCE_MODE, grad_modes
from amp_graph.modules import Run

CROSSES = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)


@dataclass
class _Part:
    """A part while it is written.

    local: the part's node for each node of the whole.
    taken: the nodes that are its inputs.
    given: the nodes that it returns.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    root: torch.nn.Module = field(default_factory=torch.nn.Module)
    local: dict[fx.Node, fx.Node] = field(default_factory=dict)
    taken: list[fx.Node] = field(default_factory=list)
    given: list[fx.Node] = field(default_factory=list)


def run_in_parts(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    before: Iterable[fx.Node],
    compile_graph: Callable[[fx.GraphModule, list[Any]], Run],
) -> Run:
    """Return a function that runs a graph of Dynamo's, cut before these nodes, with `compile_graph`
    called for each part. Raises CaptureError where a value cannot go from one part to the next."""
    parts = _written(module, frozenset(before))
    placeholders = module.graph.find_nodes(op="placeholder")
    results = results_of(module)
    known: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))
    slots = {node: i for i, node in enumerate(placeholders)}
    _return_what_is_needed(parts, {n for n in results if isinstance(n, fx.Node)})
    steps = []
    for part in parts:
        part_module = _module_of(part, module, is_last=part is parts[-1])
        run = compile_graph(part_module, [known[n] for n in part.taken])
        for node in part.given:
            known[node] = node.meta["example_value"]
            slots[node] = len(slots)
        steps.append((run, [slots[n] for n in part.taken], [slots[n] for n in part.given]))
    count = len(slots)
    returned = [(slots[r], None) if isinstance(r, fx.Node) else (None, r) for r in results]

    def run_parts(*args: Any) -> Any:
        values = [*args, *[None] * (count - len(args))]
        for run, takes, gives in steps:
            found = run(*[values[i] for i in takes])
            for i, value in zip(gives, found, strict=True):
                values[i] = value
        return tuple(constant if i is None else values[i] for i, constant in returned)

    return run_parts


def _return_what_is_needed(parts: Sequence[_Part], needed: set[fx.Node]) -> None:
    """Have each part return what later parts take, and what the whole returns of it."""
    for part in reversed(parts):
        taken = set(part.taken)
        own = (n for n in part.local if n not in taken and n.op != "get_attr")
        part.given = [n for n in own if n in needed]
        part.graph.output(tuple(part.local[n] for n in part.given))
        needed = needed | taken


def _module_of(part: _Part, whole: fx.GraphModule, is_last: bool) -> fx.GraphModule:
    module = fx.GraphModule(part.root, part.graph, class_name=type(whole).__name__)
    module.meta.update(whole.meta)
    if is_last:
        reason: Any = getattr(whole, "compile_subgraph_reason", None)
        module.compile_subgraph_reason = reason
    return module


def _written(module: fx.GraphModule, before: frozenset[fx.Node]) -> list[_Part]:
    """Write the parts, without their returns."""
    modes, records_outside = grad_modes(module.graph), torch.is_grad_enabled()
    inputs = module.graph.find_nodes(op="placeholder")
    sizes = [n for n in inputs if not isinstance(n.meta.get("example_value"), Tensor)]
    regions: list[fx.Node] = []
    records = records_outside
    parts = [_begin(sizes, [], None)]
    for node in module.graph.nodes:
        if node in before:
            is_other = records is not records_outside
            _end(parts[-1], regions, records_outside if is_other else None)
            parts.append(_begin(sizes, regions, records if is_other else None))
        if node.op in ("placeholder", "get_attr", "output") or any(node in p.local for p in parts):
            continue
        if node.target in INFERENCE_MODE:
            raise CaptureError(f"'{node.name}' is in a graph that is to be cut")
        _copy(module, parts[-1], node)
        records = modes.get(node, records)
        if node.target is ENTER_AUTOCAST:
            regions.append(node)
        elif node.target is EXIT_AUTOCAST:
            regions.remove(node.all_input_nodes[0])
    return parts


def _begin(sizes: list[fx.Node], regions: list[fx.Node], records: bool | None) -> _Part:
    part = _Part()
    for node in sizes:
        _take(part, node)
    for node in regions:
        part.local[node] = part.graph.node_copy(node)
    if records is not None:
        part.graph.call_function(SET_GRAD_ENABLED, (records,))
    return part


def _end(part: _Part, regions: list[fx.Node], records: bool | None) -> None:
    if records is not None:
        part.graph.call_function(SET_GRAD_ENABLED, (records,))
    for node in reversed(regions):
        part.graph.call_function(EXIT_AUTOCAST, (part.local[node],))


def _copy(module: fx.GraphModule, part: _Part, node: fx.Node) -> None:
    """Copy a node, and the items of its result: only tensors leave a part."""
    for operand in node.all_input_nodes:
        if operand in part.local:
            continue
        if operand.op == "get_attr":
            target = str(operand.target)
            set_attribute(part.root, target, get_attribute(module, target))
            part.local[operand] = part.graph.node_copy(operand)
        else:
            _take(part, operand)
    part.local[node] = part.graph.node_copy(node, lambda n: part.local[n])
    if isinstance(node.meta.get("example_value"), (tuple, list)):
        for user in node.users:
            if user.target is operator.getitem and isinstance(user.args[1], int):
                _copy(module, part, user)


def _take(part: _Part, node: fx.Node) -> None:
    """Make a node an input of the part, before all that is there."""
    value = node.meta.get("example_value")
    if node.op != "placeholder" and not isinstance(value, CROSSES):
        raise CaptureError(f"'{node.name}' is a {type(value).__name__}, which no graph takes")
    first = next((n for n in part.graph.nodes if n.op != "placeholder"), None)
    with part.graph.inserting_before(first) if first else contextlib.nullcontext():
        new: Any = part.graph.placeholder(node.name)
    new.meta = {**node.meta}
    new._dynamo_source = getattr(node, "_dynamo_source", None) or ConstantSource(node.name)
    part.local[node] = new
    part.taken.append(node)
