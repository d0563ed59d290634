"""A cached function that draws random numbers draws them once, as in Python.

    @functools.lru_cache
    def features(n): return torch.randn(n, n)

Dynamo captures the function without its cache. That is the same for one that computes the same each
time, but this one would draw in each call. So the graph ends at it, if one of the operators that
run on fake tensors while it is captured draws.

Private names of PyTorch used here:

    torch._dynamo.variables.functions.WrapperUserFunctionVariable.call_function, .wrapper_obj
    torch._subclasses.fake_tensor.FakeTensorMode.dispatch
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.variables.functions import WrapperUserFunctionVariable
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_graph.dynamo_changes.ended_graphs import end_graph
from amp_graph.patching import method_inside


def _call(method: Any, function: Any, frame: Any, *called: Any) -> Any:
    if not hasattr(function.wrapper_obj, "cache_info"):
        return method(function, frame, *called)
    drawing = []

    def note(dispatch: Any, mode: Any, func: Any, *called: Any, **named: Any) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            drawing.append(func)
        return dispatch(mode, func, *called, **named)

    with method_inside(FakeTensorMode, "dispatch", note):
        result = method(function, frame, *called)
    if drawing:
        end_graph("random numbers in a cached function", function.wrapper_obj)
    return result


CHANGES = ((WrapperUserFunctionVariable, "call_function", _call),)
