"""A function that is the default of an argument may leave a graph.

    class Values:
        def __init__(self, values, told=lambda values: values): ...

Dynamo does not know where captured code would find such a function, and refuses to return it, or
an object that holds it: nothing of a model that makes one was captured. Here the function becomes a
global of the captured code.

Private names of PyTorch used here:

    torch._dynamo.variables.UserFunctionVariable.reconstruct, .fn, .source
    torch._dynamo.codegen.PyCodegen.tx.output.install_global_by_id, .create_load_global
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.variables import UserFunctionVariable


def _reconstruct(method: Any, function: Any, codegen: Any) -> None:
    if type(function) is not UserFunctionVariable or function.source is not None:
        method(function, codegen)
        return
    name = codegen.tx.output.install_global_by_id("default", function.fn)
    codegen.append_output(codegen.create_load_global(name, add=True))


CHANGES = ((UserFunctionVariable, "reconstruct", _reconstruct),)
