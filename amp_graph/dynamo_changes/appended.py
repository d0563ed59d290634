"""A list that a model only appends to is not read.

    def log(module, args, output):
        activations[name].append((output.mean().item(), output.shape))

Dynamo reads the list, and guards how many items it has: one more in each call, for which the model
would be captured in each call. Here the item is appended behind the graph, as Dynamo does with what
is to be printed. Where the model reads the list as well, behind that, it is captured as ever.

Private names of PyTorch used here:

    torch._dynamo.symbolic_convert.InstructionTranslatorBase._load_attr, .stack, .push, .pop
    InstructionTranslatorBase.speculation_log    kept where the capture of a frame begins anew
    .output.root_tx.debug_locals                 calls behind a graph, and what they are given
    .output.current_tracer, .root_tracer, .side_effects, .export
    torch._dynamo.variables.misc.DebuggingVariable, ._nonvar_fields      what is called there
    torch._dynamo.variables.LazyVariableTracker.peek_value       what nothing has read
    torch._dynamo.variables.TensorVariable, tensor.SymNodeVariable
    torch._dynamo.variables.ListVariable, TupleVariable, lists.SizeVariable, ConstDictVariable
    torch._dynamo.variables.builder.VariableBuilder._wrap, .tx    reads a list
    torch._dynamo.exc.SpeculationRestartAnalysis                 by which that begins anew
    torch._dynamo.source.AttrSource
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.exc import SpeculationRestartAnalysis
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import (
    ConstantVariable,
    ConstDictVariable,
    ListVariable,
    TensorVariable,
    TupleVariable,
)
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.lists import SizeVariable
from torch._dynamo.variables.misc import DebuggingVariable
from torch._dynamo.variables.tensor import SymNodeVariable

from amp_graph.dynamo_changes.unknown_text import TEXTS
from amp_graph.dynamo_changes.unread import LISTS, class_of_list, class_of_unread

METHODS = ("append", "extend")
SINGLE = (TensorVariable, ConstantVariable, SymNodeVariable, *TEXTS)
SEQUENCES = (ListVariable, TupleVariable, SizeVariable)
# Lists by their ids, as attributes of what Dynamo keeps for an attempt, and for all of a frame.
APPENDED, READ = "_amp_graph_appended", "_amp_graph_read"
MOST = 4  # such lists in a frame, for each of which its capture begins anew


def _ids(holder: Any, name: str) -> set[int]:
    ids: set[int] = vars(holder).setdefault(name, set())
    return ids


class _Grow(DebuggingVariable):
    """A method of a list that nothing has read, by which it grows."""

    # Not read where a graph ends.
    _nonvar_fields = {"held", *DebuggingVariable._nonvar_fields}  # noqa: RUF012

    def __init__(self, held: Any, name: str) -> None:
        super().__init__(getattr(list, name), source=AttrSource(held.source, name))
        self.held, self.name = held, name

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        output = tx.output
        is_inner = output.current_tracer is not output.root_tracer
        is_plain = len(args) == 1 and not kwargs and self._takes(args[0])
        if is_inner or not is_plain or class_of_list(self.held) is None:  # read meanwhile
            return self.held.realize().call_method(tx, self.name, [*args], kwargs)
        _ids(output, APPENDED).add(id(self.held.peek_value()))
        output.root_tx.debug_locals.append((self, [*args]))
        return ConstantVariable.create(None)

    def _takes(self, given: Any) -> bool:
        """Whether what is given may be appended at the end of the graph. Of an unread list it is
        not known whether it is the one that grows."""
        is_list = class_of_unread(given) is None and isinstance(given, SEQUENCES)
        return _stays(given) and (is_list or self.name == "append")


def _stays(item: Any) -> bool:
    """Whether an item is the same at the end of the graph: what was given, and not read, and what
    is made of such items."""
    if class_of_unread(item) is not None and item.source is not None:
        return True
    item = item.realize()
    if isinstance(item, SEQUENCES):
        return all(map(_stays, item.items))
    if isinstance(item, ConstDictVariable):
        return all(map(_stays, item.items.values()))
    return isinstance(item, SINGLE)


def growth_of(held: Any, name: str, frame: Any) -> Any:
    """Return what Dynamo is to take for such a method of a list, or None to go on as ever."""
    is_growth = name in METHODS and class_of_unread(held) in LISTS
    return _Grow(held, name) if is_growth and _may_wait(held, frame) else None


def _look_up(method: Any, frame: Any, name: str) -> Any:
    growth = growth_of(frame.stack[-1], name, frame)
    if growth is None:
        return method(frame, name)
    frame.pop()
    frame.push(growth)
    return None


def _may_wait(held: Any, frame: Any) -> bool:
    value, read = held.peek_value(), _ids(frame.speculation_log, READ)
    is_read = id(value) in read or len(read) >= MOST or value in frame.output.side_effects
    return held.source is not None and not is_read and not frame.export


def _read(method: Any, builder: Any, value: Any) -> Any:
    if type(value) in LISTS and id(value) in _ids(builder.tx.output, APPENDED):
        _ids(builder.tx.speculation_log, READ).add(id(value))
        raise SpeculationRestartAnalysis(restart_reason="a list that was appended to is read")
    return method(builder, value)


CHANGES = (
    (InstructionTranslatorBase, "_load_attr", _look_up),
    (VariableBuilder, "_wrap", _read),
)
