"""Text that is made by `%` of numbers that depend on data is made behind the graph.

    print("loss %.3f" % loss.item())            self.log.append("%d: %.3f" % (step, loss.item()))

Dynamo knows `format` of such numbers. Of this it takes a TypeError for the answer (2.13), and
leaves the whole frame to Python.

Private names of PyTorch used here:

    torch._dynamo.variables.VariableTracker.reconstruct     how a value is made behind a graph
    torch._dynamo.variables.TupleVariable, ConstDictVariable, tensor.SymNodeVariable
    torch._dynamo.codegen.PyCodegen.add_push_null, .load_import_from, .extend_output
    torch._dynamo.bytecode_transformation.create_call_function
    torch.fx.experimental.symbolic_shapes.has_free_unbacked_symbols     depends on data
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.variables import ConstDictVariable, TupleVariable, VariableTracker
from torch._dynamo.variables.tensor import SymNodeVariable
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols


class PercentFormatVariable(VariableTracker):
    """Text of a format and of what is put into it."""

    def __init__(self, text: Any, given: Any) -> None:
        super().__init__()
        self.text, self.given = text, given

    def python_type(self) -> type[str]:
        return str

    def reconstruct(self, codegen: Any) -> None:
        codegen.add_push_null(lambda: codegen.load_import_from("operator", "mod"))
        codegen(self.text)
        codegen(self.given)
        codegen.extend_output(create_call_function(2, False))


def _format(method: Any, builtin: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    text, given = (arg.realize() for arg in args)
    is_text = text.is_python_constant() and isinstance(text.as_python_constant(), str)
    if is_text and any(map(_is_open, _parts(given))):
        return PercentFormatVariable(text, given)
    return method(builtin, frame, args, kwargs)


def _is_open(part: Any) -> bool:
    """Whether it is a number of which no graph is captured for each value. Names of layers are made
    of integers."""
    part = part.realize()
    if not isinstance(part, SymNodeVariable):
        return False
    return part.python_type() is float or has_free_unbacked_symbols(part.sym_num)


def _parts(given: Any) -> Iterable[Any]:
    if isinstance(given, TupleVariable):
        return given.items
    return given.items.values() if isinstance(given, ConstDictVariable) else (given,)


BUILTINS = {operator.mod: _format}
