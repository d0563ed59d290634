"""A method of a container that is called with what ends a graph.

    seen.append(lengths.tolist())

Python looks up `seen.append` before the graph ends, and calls it behind that place: it is an input
of what is captured there. It is another object in each call, and Dynamo guards which one, so that
the code behind was captured in each call. Here guards are on its name and on the container.

Private names of PyTorch used here:

    torch._dynamo.variables.builder.VariableBuilder._wrap, .source, .tx
    torch._dynamo.variables.VariableTracker.build, GetAttrVariable
    torch._dynamo.source.AttrSource, LocalSource
"""

from __future__ import annotations

from types import BuiltinMethodType
from typing import Any

from torch._dynamo.source import AttrSource, LocalSource
from torch._dynamo.variables import GetAttrVariable, VariableTracker
from torch._dynamo.variables.builder import VariableBuilder

from amp_graph.dynamo_changes.appended import growth_of
from amp_graph.dynamo_changes.own_guards import hold_while
from amp_graph.snapshots import CONTAINERS


def _wrap(method: Any, builder: Any, value: Any) -> Any:
    source = builder.source
    is_bound = type(value) is BuiltinMethodType and type(value.__self__) in CONTAINERS
    if not is_bound or not isinstance(source, LocalSource):
        return method(builder, value)
    name = value.__name__
    hold_while(_is_named, source, f"it is a method {name!r}", name)
    owner = VariableTracker.build(builder.tx, value.__self__, AttrSource(source, "__self__"))
    growth = growth_of(owner, name, builder.tx)
    return growth or GetAttrVariable(owner, name, py_type=type(value))


def _is_named(name: str, asked: Any) -> bool:
    return type(asked) is BuiltinMethodType and asked.__name__ == name


CHANGES = ((VariableBuilder, "_wrap", _wrap),)
