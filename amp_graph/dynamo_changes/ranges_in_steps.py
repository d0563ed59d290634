"""A range in steps up to a size that varies is captured once for each number of steps.

    range(0, len(x), 4096)   ->   range(0, 4096 * steps, 4096)

Losses go through a batch in chunks so. Dynamo asks for the size itself, and captures each anew.

Private names of PyTorch used here:

    torch._dynamo.variables.tensor.SymNodeVariable.sym_num    a size that varies
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.tensor import SymNodeVariable


def _count(method: Any, builtin: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    if len(args) == 3:
        start, stop, step = (value.realize() for value in args)
        is_known = start.is_python_constant() and step.is_python_constant()
        if is_known and isinstance(stop, SymNodeVariable):
            end = _end(start.as_python_constant(), stop.sym_num, step.as_python_constant())
            args = [start, stop if end is None else ConstantVariable.create(end), step]
    return method(builtin, frame, args, kwargs)


def _end(start: int, size: Any, step: int) -> int | None:
    """Return where a range of as many steps ends, and have that number guarded."""
    if step < 2:
        return None
    return start + max(int((size - start + step - 1) // step), 0) * step


BUILTINS = {range: _count}
