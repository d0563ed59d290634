"""A cached function that draws random numbers draws them once, as in Python.

    @functools.lru_cache
    def features(n): return torch.randn(n, n)

Dynamo captures what is cached, and passes the cache over. That is the same for a function which
computes the same each time, but here the graph would draw in each call. It ends instead.

Private names of PyTorch used here; seen to work on 2.11 and 2.13:

    torch._dynamo.variables.functions.WrapperUserFunctionVariable.call_function, .wrapper_obj
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch
from torch import fx
from torch._dynamo.variables.functions import WrapperUserFunctionVariable
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from amp_graph.dynamo_changes.ended_graphs import end_graph
from amp_graph.dynamo_changes.replaced import method_inside


def cached_draws_left_to_python() -> contextlib.AbstractContextManager[None]:
    """Within, it does."""
    return method_inside(WrapperUserFunctionVariable, "call_function", _call)


def _call(method: Any, function: Any, frame: Any, *called: Any) -> Any:
    if not hasattr(function.wrapper_obj, "cache_info"):
        return method(function, frame, *called)
    before = len(frame.output.graph.nodes)
    result = method(function, frame, *called)
    captured = itertools.islice(frame.output.graph.nodes, before, None)
    with frame.output.fake_mode, torch.no_grad(), _Noting() as noting:  # type: ignore[no-untyped-call]
        for node in filter(_computes, captured):
            _run(node)
    if noting.draws:
        end_graph("random numbers in a cached function", function.wrapper_obj)
    return result


class _Noting(TorchDispatchMode):
    """Notes whether an operator draws random numbers."""

    draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _computes(node: fx.Node) -> bool:
    """Whether it makes a value, and has no body."""
    is_call = node.op in ("call_function", "call_method") and "example_value" in node.meta
    return is_call and not isinstance(node.target, HigherOrderOperator)


def _run(node: fx.Node) -> None:
    """Once more, on the fake tensors that Dynamo made."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["example_value"])
    if callable(node.target):
        node.target(*args, **kwargs)
    else:
        getattr(args[0], node.target)(*args[1:], **kwargs)
