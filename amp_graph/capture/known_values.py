"""What Dynamo knows of a value, and does not use, does not end a graph.

    if type(w).__module__.startswith("torchao."):    what a class is called: so PEFT asks in DoRA
    x.mean(axes)                                     a list of a subclass: such are those of Keras

Private names of PyTorch used here; seen to work on 2.11, 2.13 and 2.15:

    torch._dynamo.variables.misc.GetAttrVariable    an attribute that Dynamo has not looked up
    torch._dynamo.variables.user_defined.UserDefinedListVariable._base_vt
                    its items; _list_vt on 2.11, itself on 2.15
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.misc import GetAttrVariable
from torch._dynamo.variables.user_defined import UserDefinedListVariable

from amp_graph.capture.replaced import method_inside


@contextlib.contextmanager
def known_values() -> Iterator[None]:
    """Within, methods of a string that is an attribute are those of the string, and an operator
    gets the list that a list of a subclass is."""
    with (
        method_inside(GetAttrVariable, "call_method", _call_method),
        method_inside(UserDefinedListVariable, "as_proxy", _as_proxy),
    ):
        yield


def _call_method(method: Any, attribute: Any, *args: Any) -> Any:
    if attribute.is_python_constant() and isinstance(attribute.as_python_constant(), str):
        return ConstantVariable.create(attribute.as_python_constant()).call_method(*args)
    return method(attribute, *args)


def _as_proxy(method: Any, variable: Any) -> Any:
    own = vars(variable)
    items = own.get("_base_vt") or own.get("_list_vt") or variable
    return [item.as_proxy() for item in items.items]
