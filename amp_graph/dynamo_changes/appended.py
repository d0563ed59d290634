"""A list that a model only appends to is not read.

    def log(module, args, output):
        activations[name].append(output.mean().item())

Dynamo reads the list, and guards how many items it has: one more in each call, for which the model
would be captured in each call. Here the item is appended behind the graph, as Dynamo does with what
is to be printed. Where the model reads the list as well, behind that, it is captured as ever.

Private names of PyTorch used here:

    torch._dynamo.symbolic_convert.InstructionTranslatorBase._load_attr, .stack, .push, .pop
    InstructionTranslatorBase.speculation_log    kept where the capture of a frame begins anew
    .output.root_tx.debug_locals                 calls behind a graph, and what they are given
    .output.current_tracer, .root_tracer, .side_effects, .export
    torch._dynamo.variables.misc.DebuggingVariable               what is called there
    torch._dynamo.variables.LazyVariableTracker.peek_value       what nothing has read
    torch._dynamo.variables.TensorVariable, tensor.SymNodeVariable
    torch._dynamo.variables.builder.VariableBuilder._wrap, .tx    reads a list
    torch._dynamo.exc.SpeculationRestartAnalysis                 by which that begins anew
    torch._dynamo.source.AttrSource
    torch._dynamo.guards.install_guard
"""

from __future__ import annotations

from collections import deque
from typing import Any

from torch._dynamo.exc import SpeculationRestartAnalysis
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.misc import DebuggingVariable
from torch._dynamo.variables.tensor import SymNodeVariable

from amp_graph.dynamo_changes.unread import class_of_unread

KINDS = (list, deque)
ITEMS = (TensorVariable, ConstantVariable, SymNodeVariable)
# Lists by their ids, as attributes of what Dynamo keeps for an attempt, and for all of a frame.
APPENDED, READ = "_amp_graph_appended", "_amp_graph_read"
MOST = 4  # such lists in a frame, for each of which its capture begins anew


def _ids(holder: Any, name: str) -> set[int]:
    ids: set[int] = vars(holder).setdefault(name, set())
    return ids


class _Append(DebuggingVariable):
    """The method of a list that nothing has read."""

    def __init__(self, held: Any) -> None:
        super().__init__(list.append, source=AttrSource(held.source, "append"))
        self.held = held

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        output = tx.output
        is_read = class_of_unread(self.held) is None  # meanwhile
        is_plain = len(args) == 1 and not kwargs and _stays(args[0])
        if is_read or not is_plain or output.current_tracer is not output.root_tracer:
            return self.held.realize().call_method(tx, "append", [*args], kwargs)
        install_guard(self.held.source.make_guard(GuardBuilder.TYPE_MATCH))
        _ids(output, APPENDED).add(id(self.held.peek_value()))
        output.root_tx.debug_locals.append((self, [*args]))
        return ConstantVariable.create(None)


def _stays(item: Any) -> bool:
    """Whether an item is the same at the end of the graph: what was given, and not read, too."""
    if class_of_unread(item) is not None:
        return item.source is not None
    return isinstance(item.realize(), ITEMS)


def _look_up(method: Any, frame: Any, name: str) -> Any:
    held = frame.stack[-1]
    if name == "append" and class_of_unread(held) in KINDS and _may_wait(held, frame):
        frame.pop()
        frame.push(_Append(held))
        return None
    return method(frame, name)


def _may_wait(held: Any, frame: Any) -> bool:
    value, read = held.peek_value(), _ids(frame.speculation_log, READ)
    is_read = id(value) in read or len(read) >= MOST or value in frame.output.side_effects
    return held.source is not None and not is_read and not frame.export


def _read(method: Any, builder: Any, value: Any) -> Any:
    if type(value) in KINDS and id(value) in _ids(builder.tx.output, APPENDED):
        _ids(builder.tx.speculation_log, READ).add(id(value))
        raise SpeculationRestartAnalysis(restart_reason="a list that was appended to is read")
    return method(builder, value)


CHANGES = (
    (InstructionTranslatorBase, "_load_attr", _look_up),
    (VariableBuilder, "_wrap", _read),
)
