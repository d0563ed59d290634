"""Join parts of a tensor that are taken out one by one, so that they are taken out together.

    q, k, v = qkv[0], qkv[1], qkv[2]        ->  q, k, v = qkv.unbind(0)
    x1, x2 = x[..., :n], x[..., n:]         ->  x1, x2 = x.split([n, n], -1)
    x1, x2 = x[..., ::2], x[..., 1::2]      ->  x1, x2 = x.unflatten(-1, (n, 2)).unbind(-1)

Autograd makes each part's gradient one of the whole tensor, zeros but for that part, and adds them
up; for parts taken out together it puts the gradients side by side. The values are the same. Dynamo
takes parts out one by one even where a model does not: `q, k, v = qkv`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from amp_graph.graphs.aten import arguments, storages, tensors_of, written_operands
from amp_graph.graphs.grad_modes import recorded_nodes

aten = torch.ops.aten
BOUNDS = ("index", "start", "end", "step")


def join_parts(module: fx.GraphModule) -> fx.GraphModule:
    """Take parts of a tensor out together, in place, and return the module.

    The parts have to make up all of the tensor, and nobody may write to their memory, in the graph
    or, for a result that lives there, after it: autograd lets nobody write into one of several
    views.
    """
    found = [*_whole(module.graph)]
    if not found:
        return module
    taboo = {key for given in module.graph.output_node().all_input_nodes for key in storages(given)}
    for node in module.graph.nodes:
        taboo.update(key for o in written_operands(module, node) for key in storages(o))
    for spans in found:
        first, *_ = spans
        if taboo.isdisjoint(storages(first)):
            _join(module.graph, spans)
    module.recompile()
    return module


def _whole(graph: fx.Graph) -> Iterator[dict[fx.Node, range]]:
    """Yield the parts that make up all of a tensor along a dimension, each with its span. Parts of
    another step, and those that autograd records, are kept apart from the rest."""
    parts: dict[tuple[Any, ...], dict[fx.Node, range]] = {}
    recorded = recorded_nodes(graph)
    for node in graph.nodes:
        span = _span(node)
        if span is not None:
            key = *_along(node), node.target, span.step, node in recorded
            parts.setdefault(key, {})[node] = span
    for (whole, dimension, *_), spans in parts.items():
        distinct = _distinct(spans)
        if len(distinct) > 1 and _make_up(_size(whole, dimension), distinct):
            yield spans


def _distinct(spans: Mapping[fx.Node, range]) -> list[range]:
    return sorted({*spans.values()}, key=lambda span: span.start)


def _make_up(size: int, spans: Sequence[range]) -> bool:
    """Whether spans of one step cover each number below a size once, end to end or by turns."""
    step = spans[0].step
    if step > 1:
        return size % step == 0 and spans == [range(i, size, step) for i in range(step)]
    return [0, *(span.stop for span in spans)] == [*(span.start for span in spans), size]


def _along(node: fx.Node) -> tuple[fx.Node, int]:
    """Return the tensor that a part is taken out of, and the dimension."""
    given = arguments(node)
    return given["self"], given.get("dim", 0) % tensors_of(given["self"])[0].dim()


def _size(whole: fx.Node, dimension: int) -> Any:
    return tensors_of(whole)[0].shape[dimension]


def _span(node: fx.Node) -> range | None:
    """Return the span of a part, at least one element; None if it is not known."""
    if node.target not in (aten.select.int, aten.slice.Tensor):
        return None
    whole, dimension = _along(node)
    given, size = arguments(node), _size(whole, dimension)
    numbers = [size, *(given[n] for n in BOUNDS if given.get(n) is not None)]
    if tensors_of(whole)[0].layout is not torch.strided or {*map(type, numbers)} != {int}:
        return None
    if "index" in given:
        start = given["index"] % size
        return range(start, start + 1)
    return range(size)[given.get("start") : given.get("end") : given.get("step", 1)] or None


def _join(graph: fx.Graph, spans: Mapping[fx.Node, range]) -> None:
    first, *_ = spans
    whole, dimension = _along(first)
    distinct = _distinct(spans)
    of_span = {span: node for node, span in reversed([*spans.items()])}
    step = distinct[0].step
    with graph.inserting_before(first):
        if first.target is aten.select.int:
            together = graph.call_function(aten.unbind.int, (whole, dimension))
        elif step == 1:
            sizes = [len(span) for span in distinct]
            together = graph.call_function(aten.split_with_sizes.default, (whole, sizes, dimension))
        else:
            sizes = [len(distinct[0]), step]
            turns = graph.call_function(aten.unflatten.int, (whole, dimension, sizes))
            turns.meta = first.meta | {"val": tensors_of(whole)[0].unflatten(dimension, sizes)}
            together = graph.call_function(aten.unbind.int, (turns, dimension + 1))
        together.meta = first.meta | {"val": [of_span[span].meta["val"] for span in distinct]}
        taken = {}
        for i, span in enumerate(distinct):
            taken[span] = graph.call_function(operator.getitem, (together, i))
            taken[span].meta = of_span[span].meta
    for node, span in spans.items():
        node.replace_all_uses_with(taken[span])
        graph.erase_node(node)
