"""`Variable(x)`, as scripts of the first years of PyTorch say, does not end a graph.

    hidden = Variable(torch.zeros(n, 20))
    self.memory = Variable(h.data)

It has been `x.detach()` since tensors are variables. One that is to require a gradient ends the
graph.

Private names of PyTorch used here:

    torch._dynamo.variables.UserDefinedClassVariable.call_function, .value  a class that is called
    torch._dynamo.variables.TensorVariable                                  a value of the graph
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.variables import TensorVariable, UserDefinedClassVariable
from torch.autograd import Variable

from amp_graph.dynamo_changes.known_values import constants
from amp_graph.dynamo_changes.replaced import Change

SAID_OF_IT = {"requires_grad", "volatile"}


def _call(method: Any, called: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    if called.value is Variable and len(args) == 1 and SAID_OF_IT.issuperset(kwargs):
        value, known = args[0].realize(), constants((), kwargs)
        if isinstance(value, TensorVariable) and known and not any(known[1].values()):
            return value.call_method(frame, "detach", [], {})
    return method(called, frame, args, kwargs)


CHANGES: tuple[Change, ...] = ((UserDefinedClassVariable, "call_function", _call),)
