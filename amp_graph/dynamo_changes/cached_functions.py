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

from torch import fx
from torch._dynamo.variables.functions import WrapperUserFunctionVariable

from amp_graph.dynamo_changes.ended_graphs import end_graph
from amp_graph.dynamo_changes.replaced import method_inside

DRAWING = (
    "bernoulli", "cauchy", "dropout", "exponential", "geometric", "log_normal", "multinomial",
    "normal", "poisson", "rand", "uniform",
)  # fmt: skip


def cached_draws_left_to_python() -> contextlib.AbstractContextManager[None]:
    """Within, it does."""
    return method_inside(WrapperUserFunctionVariable, "call_function", _call)


def _call(method: Any, function: Any, frame: Any, *called: Any) -> Any:
    if not hasattr(function.wrapper_obj, "cache_info"):
        return method(function, frame, *called)
    before = len(frame.output.graph.nodes)
    result = method(function, frame, *called)
    if any(map(_draws, itertools.islice(frame.output.graph.nodes, before, None))):
        end_graph("random numbers in a cached function", function.wrapper_obj)
    return result


def _draws(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    name = str(getattr(node.target, "__name__", node.target))
    return name.strip("_").startswith(DRAWING)
