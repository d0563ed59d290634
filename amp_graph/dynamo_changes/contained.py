"""A tensor is found in a list or tuple that holds it.

    if mask in (None, self.mask):

Python asks first whether an item is the one that it looks for. Dynamo compares numbers with
numbers, which makes a tensor of the answer, and an error of a branch on it.

Private names of PyTorch used here:

    torch._dynamo.variables.lists.iter_contains     a function that `in` is captured by
    torch._dynamo.variables.TensorVariable          a value of the graph
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch._dynamo.variables import ConstantVariable, TensorVariable, lists

from amp_graph.dynamo_changes.known_values import fake_of
from amp_graph.dynamo_changes.replaced import existing


def _look(method: Any, items: Iterable[Any], sought: Any, *others: Any, **named: Any) -> Any:
    if not isinstance(sought, TensorVariable):
        return method(items, sought, *others, **named)
    among = [item.realize() for item in items]
    for item in among:
        if isinstance(item, TensorVariable) and fake_of(item) is fake_of(sought):
            return ConstantVariable.create(True)
        if not _differs(item):
            break
    return method(among, sought, *others, **named)


def _differs(item: Any) -> bool:
    """Whether it differs from all tensors, without a look at their numbers."""
    known = item.is_python_constant() and item.as_python_constant()
    return known is None or isinstance(known, str)


CHANGES = existing((lists, "iter_contains", _look))
