"""What the classes of PyTorch are called does not end a graph.

    if type(w).__module__.startswith("torchao."):

PEFT asks so for each weight in DoRA. Dynamo knows such a name, and has no methods for it.

Private names of PyTorch used here; seen to work on 2.11, 2.13 and 2.15:

    torch._dynamo.variables.misc.GetAttrVariable    an attribute that Dynamo has not looked up
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.misc import GetAttrVariable

from amp_graph.capture.replaced import method_inside


def names_known() -> contextlib.AbstractContextManager[None]:
    """Within, methods of a string that is an attribute are those of the string."""
    return method_inside(GetAttrVariable, "call_method", _call_method)


def _call_method(method: Any, attribute: Any, *args: Any) -> Any:
    if attribute.is_python_constant() and isinstance(attribute.as_python_constant(), str):
        return ConstantVariable.create(attribute.as_python_constant()).call_method(*args)
    return method(attribute, *args)
