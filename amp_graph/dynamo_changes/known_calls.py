"""Calls of functions whose answer is known while they are captured, though it depends on data.

Of an input of the graph, Dynamo has the tensor that was given. So a question about it can be
answered, and a guard asks the same of each tensor that is given later.

Private names of PyTorch used here:

    torch._dynamo.variables.UserFunctionVariable.call_function, .fn      a function to capture
    torch._dynamo.variables.TensorVariable.as_proxy                      a value of the graph
    torch._dynamo.variables.builder.GraphArg.source, .example   behind a placeholder's "grapharg"
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.variables import ConstantVariable, TensorVariable, UserFunctionVariable

from amp_graph.dynamo_changes.own_guards import hold_while
from amp_graph.dynamo_changes.replaced import Change
from amp_graph.graphs.writes import is_as_made

# Returns the result of a call, given the function, the frame and the arguments, or None to capture
# the call.
Find = Callable[..., Any]


def by_name(finds: Mapping[tuple[str, str], Find]) -> Change:
    """Dynamo finds what functions return, by module and name, if called without keywords."""

    def call_function(method: Any, function: Any, frame: Any, args: Any, kwargs: Any) -> Any:
        code = function.fn
        find = finds.get((code.__module__, code.__name__))
        if find is not None and args and not kwargs:
            found = find(code, frame, *[value.realize() for value in args])
            if found is not None:
                return found
        return method(function, frame, args, kwargs)

    return UserFunctionVariable, "call_function", call_function


def given_to(node: fx.Node) -> Any:
    """Return what Dynamo knows of the input that a node stands for; None of any other node."""
    return node.meta.get("grapharg") if node.op == "placeholder" else None


def asked_instead(stand_in: Any) -> Find:
    """Ask this function, which has the same parameters, if the first argument is a tensor. One of
    another version, with others, is asked itself."""

    def find(code: Any, frame: Any, value: Any, *rest: Any) -> Any:
        is_known = [*signature(code).parameters] == [*signature(stand_in).parameters]
        if not is_known or not isinstance(value, TensorVariable):
            return None
        return UserFunctionVariable(stand_in).call_function(frame, [value, *rest], {})

    return find


def looked_at(
    condition: Callable[[Tensor], bool], said: str, source: Callable[[fx.Node], fx.Node]
) -> Find:
    """Whether a condition holds of an input of the graph, and as long as it does: `source` finds
    where a value comes from. False of other values, and where nobody may look."""

    @functools.wraps(condition)
    def holds(value: Any) -> bool:
        return may_look(value) and condition(value)

    def find(code: Any, frame: Any, value: Any) -> Any:
        node = source(value.as_proxy().node)
        given = given_to(node)
        if given is None or not is_as_made(node) or not holds(given.example):
            return ConstantVariable.create(False)
        hold_while(holds, given.source, said)
        return ConstantVariable.create(True)

    return find


def may_look(value: Any) -> bool:
    """Whether the host may look into it: not into one without numbers, nor while a CUDA graph is
    recorded, for other numbers."""
    if type(value) is not Tensor or value.is_meta:
        return False
    return not (value.is_cuda and torch.cuda.is_current_stream_capturing())
