"""A tensor is found in a list or tuple that holds it, and a number among numbers that vary.

    if mask in (None, self.mask):

Python asks first whether an item is the one that it looks for. Dynamo compares numbers with
numbers, which makes a tensor of the answer, and an error of a branch on it.

    if 64 in (height, width):           if (64, 64) in (x.shape[2:], (32, 32)):

Dynamo looks among the constants alone, and says that a size which varies is another number (torch
2.13; not 2.15).

Private names of PyTorch used here:

    torch._dynamo.variables.lists.iter_contains     a function that `in` is captured by
    torch._dynamo.variables.TensorVariable          a value of the graph
    torch._dynamo.variables.tensor.SymNodeVariable  a number that varies
    torch._dynamo.variables.BuiltinVariable         a function of Python's
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch._dynamo.variables import (
    BuiltinVariable,
    ConstantVariable,
    TensorVariable,
    lists,
)
from torch._dynamo.variables.tensor import SymNodeVariable

from amp_graph.dynamo_changes.known_values import fake_of
from amp_graph.dynamo_changes.replaced import existing


def _look(method: Any, items: Iterable[Any], sought: Any, *others: Any, **named: Any) -> Any:
    is_constant = sought.is_python_constant()
    if not is_constant and not isinstance(sought, TensorVariable):
        return method(items, sought, *others, **named)
    items = [item.realize() for item in items]
    if not is_constant and _is_held(items, sought):
        return ConstantVariable.create(True)
    found = method(items, sought, *others, **named)
    is_unseen = is_constant and found.is_python_constant() and not found.as_python_constant()
    return _among_varying(items, sought, *others) if is_unseen else found


def _is_held(items: list[Any], sought: Any) -> bool:
    """Whether a tensor is the first item that may be equal to it."""
    item = next((item for item in items if not _differs(item)), None)
    return isinstance(item, TensorVariable) and fake_of(item) is fake_of(sought)


def _among_varying(items: list[Any], sought: Any, frame: Any, *_: Any) -> Any:
    """Whether a number, or a tuple or list of some, is among those that vary."""
    found: Any = ConstantVariable.create(False)
    if isinstance(value := sought.as_python_constant(), int):  # and not True, for SymPy
        sought = ConstantVariable.create(int(value))
    kinds = SymNodeVariable if isinstance(value, (int, float)) else lists.BaseListVariable
    for item in items:
        if isinstance(item, kinds) and not item.is_python_constant():
            is_it = BuiltinVariable(operator.eq).call_function(frame, [item, sought], {})
            found = BuiltinVariable(operator.or_).call_function(frame, [is_it, found], {})
    return found


def _differs(item: Any) -> bool:
    """Whether it differs from all tensors, without a look at their numbers."""
    known = item.is_python_constant() and item.as_python_constant()
    return known is None or isinstance(known, str)


CHANGES = existing((lists, "iter_contains", _look))
