"""Evenly spaced numbers, as many as a size that varies.

    torch.linspace(start, end, steps)    ->    start + step * index  in the first half,
                                               end - step * (steps - 1 - index)  in the second
                                               for step = (end - start) / (steps - 1)

Detectors make reference points so, and others grids to sample at. Dynamo asks for the number itself
(2.13), and captures each anew, slowly, as all other sizes are symbols by then. PyTorch computes
them in the same way, so that they are the same up to rounding, and the last is the end.

Private names of PyTorch used here:

    torch._dynamo.variables.tensor.SymNodeVariable.sym_num      a size that varies
    torch._dynamo.variables.UserFunctionVariable.call_function  a function to capture
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.variables import ConstantVariable, UserFunctionVariable
from torch._dynamo.variables.tensor import SymNodeVariable

DTYPES = (torch.float32, torch.float64)  # of which PyTorch rounds no more often
NAMES = ("start", "end", "steps")


def _spaced(start: Any, end: Any, steps: Any, dtype: Any, **where: Any) -> Any:
    index = torch.arange(steps, dtype=dtype, **where)
    step = (end - start) / (steps - 1)
    rising, falling = start + step * index, end - step * (steps - 1 - index)
    return torch.where(index < steps // 2, rising, falling)


SPELLED: Any = _spaced


def _call(method: Any, function: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    named = dict(zip(NAMES, args, strict=False)) | kwargs
    numbers = [named[name].realize() for name in NAMES if name in named]
    others = {name: value.realize() for name, value in named.items() if name not in NAMES}
    dtype = others.pop("dtype", ConstantVariable.create(None))
    is_plain = len(args) <= len(numbers) == len(NAMES) and others.keys() <= {"device"}
    if is_plain and dtype.is_python_constant():
        known = dtype.as_python_constant() or torch.get_default_dtype()
        if known in DTYPES and _may_be_spelled(*numbers):
            spaced = [*numbers, ConstantVariable.create(known)]
            return UserFunctionVariable(SPELLED).call_function(frame, spaced, others)
    return method(function, frame, args, kwargs)


def _may_be_spelled(start: Any, end: Any, steps: Any) -> bool:
    """Whether there are two numbers at least, as many as a size that varies, between numbers. The
    question to a symbol becomes a guard."""
    is_size = isinstance(steps, SymNodeVariable) and steps.python_type() is int
    return is_size and _is_number(start) and _is_number(end) and bool(steps.sym_num > 1)


def _is_number(value: Any) -> bool:
    is_one = isinstance(value, SymNodeVariable) or value.is_python_constant()
    return is_one and value.python_type() in (int, float)


CALLS = {torch.linspace: _call}
