"""A power by Python's function does not end a graph.

    variance = pow(x, 2).mean(-1)     captured as x ** 2

Dynamo knows the operator, and of the function only what it makes of numbers.

Private names of PyTorch used here:

    torch._dynamo.variables.BuiltinVariable     a function of Python's
"""

from __future__ import annotations

import operator
from typing import Any

from torch._dynamo.variables import BuiltinVariable


def _raise(method: Any, builtin: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    if len(args) != 2 or kwargs:
        return method(builtin, frame, args, kwargs)
    return BuiltinVariable(operator.pow).call_function(frame, args, {})


BUILTINS = {pow: _raise}
