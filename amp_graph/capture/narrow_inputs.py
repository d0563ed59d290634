"""Inputs of a graph that code in front of it, which runs under autocast, left in low precision.

A graph is rewritten from float32, so it takes such inputs widened; the pass puts casts back where
they belong. Dynamo, which captured it under autocast, recorded low values further on, too. The
retrace computes those anew, except values that graphs inside of it take and return, which are
widened like inputs. A graph that asks for a low precision is left to autocast: `x.to(w.dtype)` is
recorded as the answer that autocast gave, like a conversion that the author meant. In a region of
the model's own that turns autocast off it is so, too: `w` may come from in front of the region.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.amp import is_autocast_available
from torch.utils._pytree import tree_leaves, tree_map_only

from amp_graph.capture.autocast_regions import in_enabling_regions, in_regions
from amp_graph.dtypes import LOW
from amp_graph.graphs.aten import ASKS_FOR_LOW, ENTER_AUTOCAST, IN_REGION, bodies_of

NARROWING = ("half", "bfloat16")  # methods that ask for a precision by their name


def widen_inputs(graph: fx.GraphModule) -> list[int]:
    """Have a graph of Dynamo's, and those inside it, take float32 where autocast, in force now,
    gives less. Returns the positions of these inputs."""
    inputs = graph.graph.find_nodes(op="placeholder")
    if IN_REGION in graph.meta or not any(
        _is_under_autocast(node.meta.get("example_value")) for node in inputs
    ):
        return []
    for node in _asking(graph):
        graph.meta[ASKS_FOR_LOW] = node
        return []
    return _widen(graph)


def taking_narrow(
    run: Callable[..., Any],
    otherwise: Callable[..., Any],
    widened: Sequence[int],
    written: Container[int],
) -> Callable[..., Any]:
    """Return a function that runs such a graph on its low inputs, and writes back what it writes
    into them.

    written: the positions of the inputs that it may write into.
    otherwise: runs the graph as it was, if one of those shares memory with another input, which it
        would no longer do widened.
    """
    at_risk = [i for i in widened if i in written]

    def wide(*args: Any) -> Any:
        given = [*args]
        if at_risk and _share_memory(args, at_risk):
            return otherwise(*args)
        for i in widened:
            given[i] = args[i].float()
        results = run(*given)
        for i in at_risk:
            if given[i].is_inference() or given[i]._version:
                args[i].copy_(given[i])
        return results

    return wide


def _share_memory(args: Sequence[Any], at_risk: Sequence[int]) -> bool:
    """Whether another argument shares the memory of one of these."""
    tensors = [x for x in args if isinstance(x, Tensor) and x.layout is torch.strided]
    owners = Counter(x.untyped_storage().data_ptr() for x in tensors)
    return any(owners[args[i].untyped_storage().data_ptr()] > 1 for i in at_risk)


def _is_under_autocast(value: Any) -> bool:
    if not isinstance(value, Tensor) or not is_autocast_available(value.device.type):
        return False
    return torch.is_autocast_enabled(value.device.type)


def _is_narrow(value: Any) -> bool:
    return _is_under_autocast(value) and value.dtype in LOW


def _outside_own_regions(graph: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield the nodes for which the autocast around the graph is in force, not one of the graph's
    own."""
    inside = in_regions(graph)
    return (node for node in graph.graph.nodes if node not in inside)


def _asking(graph: fx.GraphModule) -> Iterator[str]:
    """Yield the names of nodes that ask for a low precision, in the graph or those inside it."""
    given_low = in_enabling_regions(graph)
    for node in graph.graph.nodes:
        if node in given_low or node.target is ENTER_AUTOCAST:
            continue
        if any(a in LOW for a in tree_leaves((node.args, node.kwargs)) if type(a) is torch.dtype):
            yield node.name
        if node.op == "call_method" and node.target in NARROWING:
            yield node.name
        for body in bodies_of(graph, node).values():
            yield from _asking(body)


def _widen(graph: fx.GraphModule) -> list[int]:
    widened = []
    inputs = {node: i for i, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    for node in _outside_own_regions(graph):
        bodies = bodies_of(graph, node)
        for body in bodies.values():
            _widen(body)
        if not bodies and node not in inputs:
            continue
        value = node.meta.get("example_value")
        if any(map(_is_narrow, tree_leaves(value))):
            node.meta["example_value"] = tree_map_only(Tensor, _widened, value)
            if node in inputs:
                widened.append(inputs[node])
    return widened


def _widened(value: Tensor) -> Tensor:
    if not _is_narrow(value):
        return value
    return value.detach().float().requires_grad_(value.requires_grad)
