"""Parts of a tensor that are taken out one by one, taken out together.

    q, k, v = qkv[0], qkv[1], qkv[2]        ->  q, k, v = qkv.unbind(0)
    x1, x2 = x[..., :n], x[..., n:]         ->  x1, x2 = x.split([n, n], -1)

Autograd makes of each part's gradient one of the whole tensor, zeros but for that part, and adds
them up; of parts taken out together it puts the gradients side by side. The values are the same.
Dynamo takes parts out one by one even where a model does not: `q, k, v = qkv`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from amp_graph.capture.aten import SET_GRAD_ENABLED, storages, tensors_of, written_operands

aten = torch.ops.aten
Span = tuple[int, int]  # from, and up to
END = 2**63 - 1  # as far up as there is


def join_parts(module: fx.GraphModule) -> fx.GraphModule:
    """Have an ATen graph take such parts out together, if they are all of a tensor and nobody writes
    to their memory, in the graph or, given a result that lives there, after it: autograd lets
    nobody write into one of several views. Returns the module."""
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


def _whole(graph: fx.Graph) -> Iterator[dict[fx.Node, Span]]:
    """Parts that make up all of a tensor along a dimension, each with what it spans of it. Parts
    that come under different grad modes are none."""
    parts: dict[tuple[object, ...], dict[fx.Node, Span]] = {}
    mode: fx.Node | None = None
    for node in graph.nodes:
        if node.target is SET_GRAD_ENABLED:
            mode = node
        span = _span(node)
        if span is not None:
            whole, dimension = node.args[0], _dimension(node)
            parts.setdefault((whole, dimension, node.target, mode), {})[node] = span
    for (whole, dimension, *_), spans in parts.items():
        assert isinstance(whole, fx.Node) and isinstance(dimension, int)
        end, size = 0, tensors_of(whole)[0].shape[dimension]
        distinct = sorted({*spans.values()})
        for start, stop in distinct:
            end = stop if start == end else -1
        if len(distinct) > 1 and end == size:
            yield spans


def _dimension(node: fx.Node) -> int:
    rank = tensors_of(node.all_input_nodes[0])[0].dim()
    given = node.args[1] if len(node.args) > 1 else 0
    assert isinstance(given, int)
    return given % rank


def _span(node: fx.Node) -> Span | None:
    """What a part spans, if that is known; at least one element."""
    if node.target not in (aten.select.int, aten.slice.Tensor) or node.kwargs:
        return None
    (whole,) = tensors_of(node.all_input_nodes[0])
    if whole.layout is not torch.strided:
        return None
    size = whole.shape[_dimension(node)]
    given = node.args[2:]
    if not all(type(n) is int for n in (size, *filter(None, given))):
        return None
    if node.target is aten.select.int:
        start = int(given[0]) % size  # type: ignore[call-overload]
        return start, start + 1
    start, stop, step = (*given, *(None, None, 1)[len(given) :])
    bounds = range(size)[slice(start, stop, step)]  # type: ignore[misc]
    return (bounds.start, bounds.stop) if bounds.step == 1 and len(bounds) else None


def _join(graph: fx.Graph, spans: dict[fx.Node, Span]) -> None:
    first, *_ = spans
    whole, dimension = first.args[0], _dimension(first)
    distinct = sorted({*spans.values()})
    of_span = {span: node for node, span in reversed([*spans.items()])}
    with graph.inserting_before(first):
        if first.target is aten.select.int:
            together = graph.call_function(aten.unbind.int, (whole, dimension))
        else:
            sizes = [stop - start for start, stop in distinct]
            together = graph.call_function(
                aten.split_with_sizes.default, (whole, sizes, dimension)
            )
        together.meta = dict(first.meta, val=[of_span[s].meta["val"] for s in distinct])
        taken = {}
        for i, span in enumerate(distinct):
            taken[span] = graph.call_function(operator.getitem, (together, i))
            taken[span].meta = of_span[span].meta
    for node, span in spans.items():
        node.replace_all_uses_with(taken[span])
        graph.erase_node(node)
