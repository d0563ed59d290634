"""Whether a size that varies is a multiple of a number, asked of their quotient.

    windows = x.shape[1] / 128
    if not windows.is_integer(): ...         to pad to whole windows, as in local attention

Dynamo then takes the quotient for a constant, and captures each size apart. Asked of the remainder,
as here, there are two graphs: for multiples, and for others.

Private names of PyTorch used here:

    torch._dynamo.variables.tensor.SymNodeVariable.call_method, .sym_num
    torch.SymFloat.node.expr, .shape_env.create_symintnode    an expression, and a number of one
    torch.utils._sympy.functions.IntTrueDiv                   the quotient of two integers
    torch.fx.experimental.symbolic_shapes.has_free_unbacked_symbols
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols
from torch.utils._sympy.functions import IntTrueDiv

from amp_graph.dynamo_changes.replaced import Change


def _call(method: Any, number: Any, frame: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name == "is_integer" and _is_known_quotient(number.sym_num):
        return ConstantVariable.create(_is_whole(number.sym_num.node))
    return method(number, frame, name, args, kwargs)


def _is_known_quotient(number: Any) -> bool:
    """Whether it is one of sizes that are known in a call: not of what depends on data."""
    return isinstance(number.node.expr, IntTrueDiv) and not has_free_unbacked_symbols(number)


def _is_whole(quotient: Any) -> bool:
    """Ask for the remainder, and have the answer guarded."""
    number, divisor = (
        quotient.shape_env.create_symintnode(term, hint=None) for term in quotient.expr.args
    )
    return bool(number % divisor == 0)


CHANGES: tuple[Change, ...] = ((SymNodeVariable, "call_method", _call),)
