"""What the classes of PyTorch are called does not end a graph.

    if type(w).__module__.startswith("torchao."):

PEFT asks so for each weight in DoRA. Dynamo knows such a name, and has no methods for it.

Private names of PyTorch used here; seen to work on 2.11, 2.13 and 2.15:

    torch._dynamo.variables.misc.GetAttrVariable    an attribute that Dynamo has not looked up
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._dynamo.variables import ConstantVariable, VariableTracker
from torch._dynamo.variables.misc import GetAttrVariable


@contextlib.contextmanager
def names_known() -> Iterator[None]:
    """Within, methods of a string that is an attribute are those of the string."""
    attribute: Any = GetAttrVariable
    own = attribute.__dict__.get("call_method")
    before = attribute.call_method

    def call_method(name: Any, *args: Any) -> VariableTracker:
        if name.is_python_constant() and isinstance(name.as_python_constant(), str):
            name = ConstantVariable.create(name.as_python_constant())
            result: VariableTracker = name.call_method(*args)
        else:
            result = before(name, *args)
        return result

    try:
        attribute.call_method = call_method
        yield
    finally:
        if own is None:
            del attribute.call_method
        else:
            attribute.call_method = own
