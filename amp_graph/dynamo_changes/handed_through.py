"""What a model only hands through, such as the names of its samples, tells no two calls apart.

    return {"name": batch["name"], "logits": self.head(x)}

Dynamo takes such a value from where it was given, without a look at it. But before that it asks of
what the code has made to hold it, a dictionary, list or tuple, whether that is a constant, item by
item until one is none; what it reads is guarded, so that each name would be captured by itself.
Here tensors are asked first, which are none.

Private names of PyTorch used here; seen to work on 2.11, 2.13 and 2.14:

    torch._dynamo.variables.ConstDictVariable, BaseListVariable .items, .is_python_constant
    torch._dynamo.variables.TensorVariable                       a value of the graph
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.variables import BaseListVariable, ConstDictVariable, TensorVariable


def _of_dictionary(method: Any, held: Any) -> Any:
    return not _holds_tensors(held.items.values()) and method(held)


def _of_list(method: Any, held: Any) -> Any:
    return not _holds_tensors(held.items) and method(held)


def _holds_tensors(items: Any) -> bool:
    return any(item.is_realized() and isinstance(item.realize(), TensorVariable) for item in items)


CHANGES = (
    (ConstDictVariable, "is_python_constant", _of_dictionary),
    (BaseListVariable, "is_python_constant", _of_list),
)
