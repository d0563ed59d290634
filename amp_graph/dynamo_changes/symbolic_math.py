"""Functions of `math` of a number that changes from call to call.

    temperature = math.exp(-self.steps / 1000)

Such a number is a symbol to Dynamo, which knows roots, sines and the logarithm to base 2 of
symbols, but not these, so that each number would be captured by itself. Here they are spelled in
what it knows:

    exp(x) = e ** x      log(x) = log2(x) / log2(e)      pow(2, x) = 2 ** x

The last digits of a logarithm may be others by that, which a model that counts its levels would
see: int(log(n) / log(3)). So those of integers, to a base or to base 10 stay as they are, each
captured by itself.

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
    numbers = [number.realize() for number in args]
    changes = any(isinstance(number, SymNodeVariable) for number in numbers)
    if changes and _may_be_spelled(function.value, *numbers):
        return UserFunctionVariable(SPELLED[function.value]).call_function(frame, args, kwargs)
    return method(function, frame, args, kwargs)


def _may_be_spelled(function: Any, number: Any, *others: Any) -> bool:
    if function is math.log:
        return not others and number.python_type() is float
    # A power of a negative number may be an error, where `**` makes a complex one.
    return function is not math.pow or _is_positive(number)


def _is_positive(number: Any) -> bool:
    is_constant: bool = number.is_python_constant()
    return is_constant and number.as_python_constant() > 0


def _exp(x: float) -> Any:
    return math.e ** float(x)


def _log(x: float) -> Any:
    if x <= 0:  # a guard: raised by the graph itself, the model could not catch it
        raise ValueError("math domain error")
    return math.log2(x) / math.log2(math.e)


def _pow(x: float, y: float) -> Any:
    return float(x) ** float(y)


SPELLED: dict[Any, Any] = {math.exp: _exp, math.log: _log, math.pow: _pow}
