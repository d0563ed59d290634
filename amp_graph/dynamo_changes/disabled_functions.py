"""That a function which is kept out of graphs is there is guarded where a model goes by it.

    if self.hook is not None:       with `model.hook = torch.compiler.disable(show)` in some calls
        self.hook()

Dynamo means to guard the code of such a function, and does not, so that what was captured with it
called None in later calls. Here what is there has to be kept out of graphs as well, and is called
as it is then: it may be another function in each call.

Private names of PyTorch used here; seen to work on 2.13:

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
