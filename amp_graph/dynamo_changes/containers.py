"""Deques of limited length and dictionaries with an order do in a graph what they do in Python.

    self.frames = deque(maxlen=8)           drops its first item when it is full
    self.cache.move_to_end(key)             of an OrderedDict

Dynamo forgets how long a deque may be, and that an order has changed, and does not guard the order
that `popitem` goes by. Here a write to such a deque ends the graph, so that Python does it, and a
graph puts dictionaries in their new order, with a guard on the old one.

Private names of PyTorch used here:

    torch._dynamo.variables.builder.VariableBuilder._type_dispatch, .wrap_listlike, .source
    torch._dynamo.variables.lists.DequeVariable.call_method, .maxlen
    torch._dynamo.variables.ConstDictVariable.call_method, .install_dict_keys_match_guard,
    .should_reconstruct_all
    torch._dynamo.variables.user_defined.OrderedDictVariable.call_method, ._base_vt since 2.13
    torch._dynamo.output_graph.OutputGraph.guard_on_key_order
"""

from __future__ import annotations

from collections import deque
from typing import Any

from torch._dynamo.variables import ConstantVariable, ConstDictVariable, user_defined
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.lists import DequeVariable

from amp_graph.dynamo_changes.ended_graphs import end_graph
from amp_graph.dynamo_changes.own_guards import hold_while
from amp_graph.dynamo_changes.replaced import existing

ORDERED: Any = getattr(user_defined, "OrderedDictVariable", None)
READS = ("__len__", "__getitem__", "__contains__", "__iter__", "count", "index", "copy")
BY_ORDER = ("move_to_end", "popitem")


def _wrap(builder: Any, value: Any) -> Any:
    result = builder.wrap_listlike(value)
    found = result.realize()
    if isinstance(found, DequeVariable) and value.maxlen is not None:
        found.maxlen = ConstantVariable.create(value.maxlen)
        hold_while(_has, builder.source, f"its maxlen is {value.maxlen}", value.maxlen)
    return result


def _write(method: Any, asked: Any, frame: Any, name: str, args: Any, kwargs: Any) -> Any:
    if asked.source and name not in READS and asked.maxlen.as_python_constant() is not None:
        end_graph("a write to a deque of limited length", name)
    return method(asked, frame, name, args, kwargs)


def _reorder(method: Any, ordered: Any, frame: Any, name: str, args: Any, kwargs: Any) -> Any:
    items = getattr(ordered, "_base_vt", None) or ordered
    if name in BY_ORDER and ordered.source:
        items.install_dict_keys_match_guard()
        frame.output.guard_on_key_order.update({ordered.source, items.source} - {None})
    result = method(ordered, frame, name, args, kwargs)
    if name == "move_to_end":
        items.should_reconstruct_all = True
    return result


def _has(maxlen: int, asked: deque[Any]) -> bool:
    return asked.maxlen == maxlen


ENTRIES = ((VariableBuilder._type_dispatch, {deque: _wrap}),)
CHANGES = (
    (DequeVariable, "call_method", _write),
    (ConstDictVariable, "call_method", _reorder),
    *existing((ORDERED, "call_method", _reorder)),
)
