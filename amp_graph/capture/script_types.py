"""A question of TorchScript's about a class does not end a graph.

    if torch.jit.isinstance(skip, torch.Tensor):

Networks that can also be scripted ask so (MONAI's U-Nets). Dynamo passes over `torch.jit`, and ends
the graph at each such place. Of classes it is Python's own question; one about what a container
holds (`list[Tensor]`) ends the graph as ever.

Private names of PyTorch used here; seen to work on 2.11, 2.13, 2.14 and 2.15:

    torch._dynamo.variables.SkipFunctionVariable    a function that Dynamo passes over
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo.variables import BuiltinVariable, SkipFunctionVariable, VariableTracker

CONTAINERS = (list, tuple, dict)  # to be asked for with what they hold, or TorchScript raises


@contextlib.contextmanager
def script_types_known() -> Iterator[None]:
    """Within, Dynamo answers."""
    skipped: Any = SkipFunctionVariable
    before = skipped.call_function

    def call_function(function: Any, frame: Any, args: Any, kwargs: Any) -> VariableTracker:
        if function.value is torch.jit.isinstance and not kwargs and _asks_for_classes(args):
            function = BuiltinVariable(isinstance)
            result: VariableTracker = function.call_function(frame, args, kwargs)
        else:
            result = before(function, frame, args, kwargs)
        return result

    try:
        skipped.call_function = call_function
        yield
    finally:
        skipped.call_function = before


def _asks_for_classes(args: Any) -> bool:
    if len(args) != 2 or not args[1].is_python_constant():
        return False
    asked = args[1].as_python_constant()
    classes = asked if isinstance(asked, tuple) else (asked,)
    return all(isinstance(kind, type) and kind not in CONTAINERS for kind in classes)
