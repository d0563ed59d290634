"""Functions of `math` of a number that changes from call to call.

    temperature = math.exp(-self.steps / 1000)

Such a number is a symbol to Dynamo, which knows roots, sines and the logarithm to base 2 of
symbols, but not these, so that the model would be captured anew for each number. Here they are
spelled in what it knows:

    exp(x) = e ** x  for x < 0        pow(2, x) = 2 ** x

That may change the last digits of an exponential, which does no harm between 0 and 1, but may in a
size: int(exp(x)). So those of other numbers stay as they are, each captured by itself, and so do
all logarithms, of which numbers of levels are made.

Private names of PyTorch used here:

    torch._dynamo.variables.UserFunctionVariable.call_function
    torch._dynamo.variables.tensor.SymNodeVariable.sym_num
"""

from __future__ import annotations

import math
from typing import Any

from torch._dynamo.variables import UserFunctionVariable
from torch._dynamo.variables.tensor import SymNodeVariable


def _call(method: Any, function: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    numbers = [number.realize() for number in args]
    changes = any(isinstance(number, SymNodeVariable) for number in numbers)
    if changes and _may_be_spelled(function.value, *numbers):
        return UserFunctionVariable(SPELLED[function.value]).call_function(frame, args, kwargs)
    return method(function, frame, args, kwargs)


def _may_be_spelled(function: Any, number: Any, *others: Any) -> bool:
    """Whether a function of such a number can be spelled otherwise. Questions to a symbol become
    guards."""
    if function is math.exp:
        return bool(number.sym_num < 0)
    # A power of a negative number may be an error, where `**` makes a complex one. One that
    # overflows is an error that the model may catch, which it cannot if the graph raises it.
    if not number.is_python_constant() or number.as_python_constant() <= 0:
        return False
    largest = MOST / max(abs(math.log(number.as_python_constant())), 1.0)
    return bool(-largest < others[0].sym_num) and bool(others[0].sym_num < largest)


def _exp(x: float) -> Any:
    return math.e ** float(x)


def _pow(x: float, y: float) -> Any:
    return float(x) ** float(y)


MOST = 700  # powers of e that a float64 holds
SPELLED: dict[Any, Any] = {math.exp: _exp, math.pow: _pow}
CALLS = dict.fromkeys(SPELLED, _call)
