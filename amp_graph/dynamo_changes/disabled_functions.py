"""An attribute that holds a function which is kept out of graphs may hold None in later calls.

    if self.hook is not None:       with `model.hook = torch.compiler.disable(show)` in some calls
        self.hook()

Dynamo means to guard the code of such a function, and does not, so that what was captured with it
called None. Here a guard says that there is a function which is kept out of graphs: that one is
called, and may be another in each call.

Private names of PyTorch used here:

    torch._dynamo.variables.builder.VariableBuilder._wrap, .source
    torch._dynamo.disable marks functions by                            _torchdynamo_disable
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch._dynamo.variables.builder import VariableBuilder

from amp_graph.dynamo_changes.own_guards import hold_while


def _wrap(method: Any, builder: Any, value: Any) -> Any:
    if builder.source and _is_disabled(value):
        hold_while(_is_disabled, builder.source, "it is kept out of graphs")
    return method(builder, value)


def _is_disabled(value: Any) -> bool:
    return type(value) is FunctionType and getattr(value, "_torchdynamo_disable", False) is True


CHANGES = ((VariableBuilder, "_wrap", _wrap),)
