"""Inputs that code between two graphs, which runs under autocast, left in low precision.

A graph is rewritten from float32, so it takes them widened; casts that it need not have had the
lists will put back where they belong.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from amp_graph.ir import LOW


def widen_inputs(graph: fx.GraphModule) -> list[int]:
    """Have a graph of Dynamo's take float32 where autocast, in force now, gives it less. Returns
    the positions of these inputs."""
    widened = []
    for i, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        value = node.meta.get("example_value")
        if isinstance(value, Tensor) and _is_narrow(value):
            node.meta["example_value"] = _widened(value)
            widened.append(i)
    return widened


def taking_narrow(
    run: Callable[..., Any], widened: Sequence[int], written: Container[int]
) -> Callable[..., Any]:
    """What runs that graph with such inputs; what it writes into them is written back.
    `written`: the positions of those that it may write into."""
    at_risk = [i for i in widened if i in written]

    def wide(*args: Any) -> Any:
        given = [*args]
        for i in widened:
            given[i] = args[i].float()
        results = run(*given)
        for i in at_risk:
            if given[i].is_inference() or given[i]._version:
                args[i].copy_(given[i])
        return results

    return wide


def _is_narrow(value: Tensor) -> bool:
    return value.dtype in LOW and torch.is_autocast_enabled(value.device.type)


def _widened(value: Tensor) -> Tensor:
    return value.detach().float().requires_grad_(value.requires_grad)
