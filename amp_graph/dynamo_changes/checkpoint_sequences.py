"""`checkpoint_sequential` does not end a graph.

    y = checkpoint_sequential(layers, 2, x)   ->   h = checkpoint(layers[:2], x); y = layers[2:](h)

Dynamo captures `checkpoint`, but leaves this one and all that it calls to Python. Here it captures
`in_segments` instead.

Private names of PyTorch used here:

    VariableBuilder._id_dispatch               what Dynamo makes of functions that a model uses
    torch._dynamo.variables.UserFunctionVariable
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch._dynamo.variables import UserFunctionVariable, VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from amp_graph.dynamo_changes.replaced import found_as

Layers = Sequence[Callable[[Any], Any]]


def _in_segments(value: Any, source: Any) -> VariableTracker:
    return UserFunctionVariable(in_segments)  # type: ignore[arg-type]


def in_segments(
    functions: nn.Sequential | Layers,
    segments: int,
    input: Tensor,
    *use_reentrant: Any,
    **options: Any,
) -> Any:
    """Run `checkpoint_sequential` as PyTorch does: segments of equal length, and a last one with
    the rest, which is not recomputed. The signature has no default that Dynamo 2.13 would guard in
    vain."""
    if use_reentrant:
        options["use_reentrant"] = use_reentrant[0]
    layers = [*functions.children()] if isinstance(functions, nn.Sequential) else functions
    size = len(layers) // segments
    last = size * (segments - 1)
    for begin in range(0, last, size):
        input = checkpoint(partial(_run, layers[begin : begin + size]), input, **options)
    return _run(layers[last:], input)


def _run(layers: Layers, value: Any) -> Any:
    for layer in layers:
        value = layer(value)
    return value


ENTRIES = ((VariableBuilder._id_dispatch, {id(checkpoint_sequential): found_as(_in_segments)}),)
