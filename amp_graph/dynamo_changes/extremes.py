"""`max` and `min` with a default do not end a graph.

    depth = max(map(len, self.paths), default=0)

Dynamo does not know the argument, which is the answer if there are no items.

Private names of PyTorch used here:

    torch._dynamo.variables.BuiltinVariable     a function of Python's
    torch._dynamo.variables.TupleVariable       .items
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.variables import BuiltinVariable, TupleVariable

from amp_graph.dynamo_changes.ended_graphs import end_graph


def _find(method: Any, builtin: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    if len(args) != 1 or kwargs.keys() != {"default"}:
        return method(builtin, frame, args, kwargs)
    items = BuiltinVariable(tuple).call_function(frame, args, {}).realize()
    if not isinstance(items, TupleVariable):
        end_graph("items that are not known", builtin.fn.__name__)
    return method(builtin, frame, [items], {}) if items.items else kwargs["default"]


BUILTINS = {max: _find, min: _find}
