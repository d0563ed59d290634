"""A list in a tuple that a module holds is read like any other.

    self.weights = ([1.0, 2.0], [0.5])

    h * self.weights[1][0]
    self.weights[0].append(h.shape[0])

Dynamo takes such a tuple, if it holds numbers and text alone, for a constant: it guards that the
tuple is equal to itself, and loses what is written to the list.

Private names of PyTorch used here:

    torch._dynamo.variables.builder.VariableBuilder._wrap, .install_guards, .source
    torch._dynamo.guards.GuardBuilder.SEQUENCE_LENGTH
    torch._dynamo.source.GetItemSource, .guard_source.is_unspecialized_nn_module
    torch._dynamo.variables.LazyVariableTracker, TupleVariable,
    ConstantVariable.is_literal
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import GetItemSource
from torch._dynamo.variables import ConstantVariable, LazyVariableTracker, TupleVariable
from torch._dynamo.variables.builder import VariableBuilder

from amp_graph.dynamo_changes.replaced import Change


def _wrap(method: Any, builder: Any, value: Any) -> Any:
    if type(value) is not tuple or not (_is_taken(builder, value) and _may_change(value)):
        return method(builder, value)
    builder.install_guards(GuardBuilder.SEQUENCE_LENGTH)
    source = builder.source
    items = (LazyVariableTracker.create(v, GetItemSource(source, i)) for i, v in enumerate(value))
    return TupleVariable([*items], source=source)


def _is_taken(builder: Any, value: Any) -> bool:
    """Whether Dynamo takes a tuple for a constant."""
    source = builder.source
    is_held = source is not None and source.guard_source.is_unspecialized_nn_module()
    return is_held and ConstantVariable.is_literal(value)


def _may_change(item: Any) -> bool:
    return type(item) in (list, set) or (type(item) is tuple and any(map(_may_change, item)))


CHANGES: tuple[Change, ...] = ((VariableBuilder, "_wrap", _wrap),)
