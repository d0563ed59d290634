"""A tensor that a custom autograd function is given twice is given as two views of it.

    Product.apply(x, x)   ->   Product.apply(x, x.view_as(x))

Autograd adds up the gradients of both either way. Dynamo ends the graph at such a call, or loses
the gradient of all but one (2.11).

Private names of PyTorch used here:

    torch._dynamo.variables.misc.AutogradFunctionVariable.call_apply
    torch._dynamo.variables.TensorVariable
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.misc import AutogradFunctionVariable


def _call_apply(method: Any, function: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    known: set[fx.Node] = set()
    given = []
    for value in args:
        found = value.realize()
        if isinstance(found, TensorVariable):
            node = found.as_proxy().node
            value = found.call_method(frame, "view_as", [found], {}) if node in known else value
            known.add(node)
        given.append(value)
    return method(function, frame, given, kwargs)


CHANGES = ((AutogradFunctionVariable, "call_apply", _call_apply),)
