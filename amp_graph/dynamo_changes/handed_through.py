"""Guard no values that a model only hands through, such as the names of its samples.

    return {"name": batch["name"], "logits": self.head(x)}

Dynamo returns such a value from where it was given, without a look at it. But before that it asks
whether the dictionary, list or tuple that holds it is a constant: it reads items until one is not,
and guards what it reads, so that the model would be captured anew for each name. Here what holds a
tensor is no constant, and nothing else in it is read.

Where a model asks whether a key is there, Dynamo reads what is kept by it; on 2.11 names, too. Here
that it is there is guarded, and nothing is read.

Private names of PyTorch used here:

    torch._dynamo.variables.ConstDictVariable, BaseListVariable .items, .is_python_constant
    ConstDictVariable.__contains__, .maybe_getitem_const         which reads nothing
    VariableTracker.is_realized                                  whether it was read
    torch._dynamo.variables.TensorVariable                       a value of the graph
    torch._dynamo.source.DictGetItemSource, ConstDictKeySource   a key that is no number or string
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.source import ConstDictKeySource, DictGetItemSource
from torch._dynamo.variables import BaseListVariable, ConstDictVariable, TensorVariable

from amp_graph.dynamo_changes.own_guards import hold_key


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
        return method(asked, key)
    hold_key(place.base, place.index, there=True)
    return True


def _holds_tensors(items: Any) -> bool:
    return any(item.is_realized() and isinstance(item.realize(), TensorVariable) for item in items)


CHANGES = (
    (ConstDictVariable, "is_python_constant", _of_dictionary),
    (BaseListVariable, "is_python_constant", _of_list),
    (ConstDictVariable, "__contains__", _contains),
)
