"""Functions of `math` of a number that changes from call to call.

    temperature = math.exp(-self.steps / 1000)

Such a number is a symbol to Dynamo, which knows roots, sines and the logarithm to base 2 of
symbols, but not these, so that each number would be captured by itself. Here they are spelled in
what it knows, which changes the last digits of a float64 at most.

    exp(x) = e ** x      log(x) = log2(x) / log2(e)      pow(2, x) = 2 ** x

Private names of PyTorch used here; seen to work on 2.11, 2.13 and 2.14:

    torch._dynamo.variables.TorchInGraphFunctionVariable, UserFunctionVariable.call_function
    torch._dynamo.variables.tensor.SymNodeVariable
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

from torch._dynamo.variables import TorchInGraphFunctionVariable, UserFunctionVariable
from torch._dynamo.variables.tensor import SymNodeVariable

from amp_graph.dynamo_changes.replaced import calls_inside


def symbolic_math_known() -> contextlib.AbstractContextManager[None]:
    """Within, Dynamo captures such calls."""
    return calls_inside(TorchInGraphFunctionVariable, dict.fromkeys(SPELLED, _call))


def _call(method: Any, function: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    *others, last = (number.realize() for number in args)
    # A power of a negative number may be an error, and `**` makes a complex one.
    is_known = all(n.is_python_constant() and n.as_python_constant() > 0 for n in others)
    if isinstance(last, SymNodeVariable) and is_known:
        return UserFunctionVariable(SPELLED[function.value]).call_function(frame, args, kwargs)
    return method(function, frame, args, kwargs)


def _exp(x: float) -> Any:
    return math.e ** float(x)


def _log(x: float) -> Any:
    return math.log2(x) / math.log2(math.e)


def _log10(x: float) -> Any:
    return math.log2(x) / math.log2(10)


def _pow(x: float, y: float) -> Any:
    return float(x) ** float(y)


SPELLED: dict[Any, Any] = {
    math.exp: _exp,
    math.log: _log,
    math.log10: _log10,
    math.pow: _pow,
}
