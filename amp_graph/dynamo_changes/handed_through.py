"""Guard no values that a model only hands through, such as the names of its samples.

    return {"name": batch["name"], "logits": self.head(x)}

Dynamo returns such a value from where it was given, without a look at it. But before that it asks
whether the dictionary, list or tuple that holds it is a constant: it reads items until one is not,
and guards what it reads, so that the model would be captured anew for each name. Here what holds a
tensor is no constant, and nothing else in it is read.

Where a model asks whether a key is there, Dynamo reads what is kept by it; on 2.11 names, too. Here
that it is there is guarded, and nothing is read; by a key that is no number or string, no list is.

    return self.loss(logits, batch)             where something in `loss` ends the graph

Where a graph ends, Dynamo reads all that it hands on, and guards the sizes of tensors in it, so
that the network would be captured anew for each number of boxes. Here those that nothing has read
are handed on as they were given.

Private names of PyTorch used here:

    torch._dynamo.variables.ConstDictVariable, BaseListVariable .items, .is_python_constant
    ConstDictVariable.__contains__, .maybe_getitem_const         which reads nothing
    VariableTracker.is_realized                                  whether it was read
    torch._dynamo.source.DictGetItemSource, ConstDictKeySource   a key that is no number or string
    torch._dynamo.output_graph.OutputGraph._get_stack_values_to_restore        where it ends
    torch._dynamo.variables.LazyVariableTracker.realize_all      to read all in a value
    LazyVariableTracker.as_python_constant, .is_python_constant  what nothing has read
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.source import ConstDictKeySource, DictGetItemSource
from torch._dynamo.variables import (
    BaseListVariable,
    ConstDictVariable,
    LazyVariableTracker,
)

from amp_graph.dynamo_changes.own_guards import hold_key
from amp_graph.dynamo_changes.replaced import Change
from amp_graph.dynamo_changes.unread import class_of_list, is_read_tensor, is_unread_tensor
from amp_graph.patching import method_inside


def _of_dictionary(method: Any, held: Any) -> Any:
    return not _holds_tensors(held.items.values()) and method(held)


def _of_list(method: Any, held: Any) -> Any:
    return not _holds_tensors(held.items) and method(held)


def _contains(method: Any, asked: Any, key: Any) -> Any:
    value = asked.maybe_getitem_const(key)
    if value is None or value.is_realized():
        return method(asked, key)
    place = value.source
    if not isinstance(place, DictGetItemSource) or isinstance(place.index, ConstDictKeySource):
        return class_of_list(value) is not None or method(asked, key)
    hold_key(place.base, place.index, there=True)
    return True


def _holds_tensors(items: Any) -> bool:
    return any(is_unread_tensor(item) or is_read_tensor(item) for item in items)


def _constant(method: Any, value: Any) -> Any:
    if is_unread_tensor(value):
        raise NotImplementedError  # as of any tensor
    return method(value)


def _is_constant(method: Any, value: Any) -> Any:
    return not is_unread_tensor(value) and method(value)


def _at_the_end(method: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
    with method_inside(LazyVariableTracker, "realize_all", _read_all):
        return method(graph, *args, **kwargs)


def _read_all(method: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    return value if is_unread_tensor(value) else method(value, *args, **kwargs)


CHANGES: tuple[Change, ...] = (
    (ConstDictVariable, "is_python_constant", _of_dictionary),
    (BaseListVariable, "is_python_constant", _of_list),
    (ConstDictVariable, "__contains__", _contains),
    (LazyVariableTracker, "as_python_constant", _constant),
    (LazyVariableTracker, "is_python_constant", _is_constant),
    (OutputGraph, "_get_stack_values_to_restore", _at_the_end),
)
