"""Text of numbers that depend on data is compared and looked up by Python.

    name = f"expert {index.item()}"
    if name == "expert 0": ...              in {"expert 0": 1}

Dynamo says that it is unlike any other: of a key since 2.13, of `==` before that.

Private names of PyTorch used here:

    torch._dynamo.variables.misc.StringFormatVariable       such text
    torch._dynamo.variables.VariableTracker.hash_impl       of a key, from 2.13 on
    torch._dynamo.symbolic_convert.compare_op_handlers      how `==` is captured
"""

from __future__ import annotations

import contextlib
import functools
import operator
from typing import Any

from torch._dynamo.symbolic_convert import compare_op_handlers
from torch._dynamo.variables.misc import StringFormatVariable

from amp_graph.dynamo_changes.ended_graphs import end_graph
from amp_graph.dynamo_changes.percent_formats import PercentFormatVariable
from amp_graph.dynamo_changes.replaced import Change, existing, with_entries
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


def compared_by_python() -> contextlib.AbstractContextManager[None]:
    """Within, so are comparisons that are spelled, however they are captured otherwise."""
    captures = {name: compare_op_handlers[name] for name in ("==", "!=")}
    own = {name: functools.partial(_compare, capture) for name, capture in captures.items()}
    return with_entries(compare_op_handlers, own)


BUILTINS = {operator.eq: _call, operator.ne: _call}
CONTEXTS = (compared_by_python,)
CHANGES: tuple[Change, ...] = existing(*((kind, "hash_impl", _hash) for kind in TEXTS))
