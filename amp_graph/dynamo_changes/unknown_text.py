"""Text of numbers that depend on data is compared and looked up by Python.

    name = f"expert {index.item()}"
    if name == "expert 0": ...              in {"expert 0": 1}

Dynamo says that it is unlike any other: of a key since 2.13, of `==` before that.

Private names of PyTorch used here:

    torch._dynamo.variables.misc.StringFormatVariable       such text
    torch._dynamo.variables.VariableTracker.hash_impl       of a key, from 2.13 on
"""

from __future__ import annotations

import functools
import operator
from typing import Any

from torch._dynamo.variables.misc import StringFormatVariable

from amp_graph.dynamo_changes.ended_graphs import end_graph
from amp_graph.dynamo_changes.percent_formats import PercentFormatVariable
from amp_graph.dynamo_changes.replaced import Change, existing
from amp_graph.dynamo_changes.unread import class_of_unread

TEXTS = (StringFormatVariable, PercentFormatVariable)


def _hash(method: Any, text: Any, *args: Any) -> Any:
    end_graph("text that depends on data is a key", text)


def _compare(capture: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    if any(class_of_unread(arg) is None and isinstance(arg, TEXTS) for arg in args):
        end_graph("text that depends on data is compared", args)
    return capture(frame, args, kwargs)


def _call(method: Any, builtin: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    return _compare(functools.partial(method, builtin), frame, args, kwargs)


BUILTINS = {operator.eq: _call, operator.ne: _call}
COMPARES = {"==": _compare, "!=": _compare}
CHANGES: tuple[Change, ...] = existing(*((kind, "hash_impl", _hash) for kind in TEXTS))
