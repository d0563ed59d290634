"""Graphs captured inside an autocast region of the model's own, which belong to the region.

    with torch.autocast("cpu", enabled=False):          x = self.w(x)
        y = self.inner(x)                        ->     enter_autocast("cpu", enabled=False)
                                                        ...
                                                        exit_autocast()

A module that is called behind a graph's end is captured by itself, and its graph says nothing of
the region around it. A model is called with autocast off, or under the autocast that is put around
the code between its graphs, so a region is known by how deep in autocast contexts it is.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from amp_graph.dynamo_changes.own_guards import hold_in_state
from amp_graph.graphs.aten import (
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    IN_REGION,
    WITH_AUTOCAST,
    bodies_of,
)
from amp_graph.outer_autocast import autocast_depth, autocast_devices
from amp_graph.uncaptured import passed_over


class DepthOfThread(threading.local):
    """How deep in autocast contexts this thread's model was called: `around`."""

    around = 0


_now = DepthOfThread()


def begin() -> int:
    """Begin a call of a model, or contexts that are ours. The result is for `end`."""
    before, _now.around = _now.around, autocast_depth()
    return before


@passed_over
def end(before: int) -> None:
    """End what `begin` began."""
    _now.around = before


def is_in_region() -> bool:
    """Whether this thread is inside an autocast region of the model's own."""
    return autocast_depth() > _now.around


def is_in_none() -> bool:
    return not is_in_region()


def hold_in_region(is_inside: bool) -> None:
    """Guard the current capture by whether it is inside a region."""
    if is_inside:
        hold_in_state(is_in_region, "inside of an autocast region")
    else:
        hold_in_state(is_in_none, "inside of no autocast region")


def in_regions(module: fx.GraphModule) -> frozenset[fx.Node]:
    """Return the nodes of a graph that are inside regions, or are one."""
    depth, found = int(IN_REGION in module.meta), set()
    for node in module.graph.nodes:
        depth += (node.target is ENTER_AUTOCAST) - (node.target is EXIT_AUTOCAST)
        if depth or node.target is WITH_AUTOCAST:
            found.add(node)
    return frozenset(found)


def in_enabling_regions(module: fx.GraphModule) -> frozenset[fx.Node]:
    """Return the nodes of a graph of Dynamo's for whose values a region of its own turns autocast
    on."""
    regions: dict[fx.Node, tuple[str, bool]] = {}
    found = set()
    for node in module.graph.nodes:
        if node.target is ENTER_AUTOCAST:
            kind, _, is_enabled, _ = node.args
            regions[node] = kind, is_enabled
        elif node.target is EXIT_AUTOCAST:
            del regions[node.args[0]]
        elif regions:
            innermost = dict(regions.values())
            values = tree_leaves(node.meta.get("example_value"))
            kinds = {x.device.type for x in values if isinstance(x, torch.Tensor)}
            if any(map(innermost.get, kinds)):
                found.add(node)
    return frozenset(found)


def mark_bodies(module: fx.GraphModule) -> None:
    """Mark the graphs inside a graph that are in its regions."""
    inside = in_regions(module)
    for node in module.graph.nodes:
        for body in bodies_of(module, node).values():
            if node in inside:
                body.meta[IN_REGION] = True
            mark_bodies(body)


def region_of(users: Iterable[fx.Node]) -> AbstractContextManager[Any]:
    """Return the region that all of a body is in, by the nodes that run it; a null context if there
    is none."""
    for node in users:
        if node.target is WITH_AUTOCAST:
            settings: Any = node.args[:4]
            return torch.autocast(*settings)
    return contextlib.nullcontext()


def write_region(module: fx.GraphModule) -> None:
    """Write the autocast that is in force now into a graph of Dynamo's."""
    graph = module.graph
    first = next(node for node in graph.nodes if node.op != "placeholder")
    kinds = autocast_devices()
    enabled = [kind for kind in kinds if torch.is_autocast_enabled(kind)] or kinds[:1]
    with graph.inserting_before(first):
        entered = [graph.call_function(ENTER_AUTOCAST, _as_now(kind)) for kind in enabled]
    with graph.inserting_before(graph.output_node()):
        for node in reversed(entered):
            graph.call_function(EXIT_AUTOCAST, (node,))
    module.recompile()
    module.meta[IN_REGION] = True


def _as_now(kind: str) -> tuple[str, torch.dtype, bool, bool]:
    is_enabled, caches = torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled()
    return kind, torch.get_autocast_dtype(kind), is_enabled, caches
