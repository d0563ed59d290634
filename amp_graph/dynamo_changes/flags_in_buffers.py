"""A branch on a flag that a module keeps in a buffer does not end the graph.

    self.register_buffer("initted", torch.tensor(False))       as vector quantizers and ActNorm do
    if self.initted: ...        if not self.initted: ...

It depends on data, but Dynamo has the buffer that is given, and a guard can ask later ones, as the
model does. So there is a graph for each answer. A buffer that the graph has written to is asked by
the model.

Private names of PyTorch used here:

    torch._dynamo.symbolic_convert.InstructionTranslatorBase.dispatch_table, of each subclass
                                             by opcode, how Dynamo captures an instruction
    torch._dynamo.symbolic_convert.InstructionTranslatorBase.stack
    torch._dynamo.variables.builder.GraphArg.source, .example    behind an input of the graph
    torch._dynamo.variables.TensorVariable.as_proxy
    torch._dynamo.variables.LazyVariableTracker.is_realized, .peek_type
"""

from __future__ import annotations

import contextlib
import functools
import opcode
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import ConstantVariable, LazyVariableTracker, TensorVariable

from amp_graph.dynamo_changes.grown_buffers import is_buffer
from amp_graph.dynamo_changes.known_calls import given_to, may_look
from amp_graph.dynamo_changes.own_guards import hold_while
from amp_graph.graphs.writes import is_as_made

# What asks for the truth of a value, and does not hand the value on.
ASKING = {
    number
    for name, number in opcode.opmap.items()
    if name in ("UNARY_NOT", "TO_BOOL")
    or (name.startswith("POP_JUMP") and name.endswith(("_IF_TRUE", "_IF_FALSE")))
}


@contextlib.contextmanager
def flags_known() -> Iterator[None]:
    """Within, such a flag is known where an instruction asks for it."""
    tables = {kind: kind.dispatch_table for kind in _kinds(InstructionTranslatorBase)}
    for kind, table in tables.items():
        kind.dispatch_table = [
            _asking(capture) if number in ASKING and capture is not None else capture
            for number, capture in enumerate(table)
        ]
    try:
        yield
    finally:
        for kind, table in tables.items():
            kind.dispatch_table = table


def _kinds(kind: Any) -> Iterator[Any]:
    if "dispatch_table" in vars(kind):
        yield kind
    for narrower in kind.__subclasses__():
        yield from _kinds(narrower)


def _asking(capture: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    @functools.wraps(capture)
    def ask(frame: Any, instruction: Any) -> Any:
        found = _flag(frame.stack[-1])
        if found is not None:
            frame.stack[-1] = ConstantVariable.create(found)
        return capture(frame, instruction)

    return ask


def _flag(variable: Any) -> bool | None:
    """Return whether a flag is set, which is guarded from then on; None of anything else."""
    is_unread = isinstance(variable, LazyVariableTracker) and not variable.is_realized()
    if is_unread and not issubclass(variable.peek_type(), Tensor):
        return None  # which Dynamo may answer without reading it
    if not isinstance(variable := variable.realize(), TensorVariable):
        return None
    node = variable.as_proxy().node
    given = given_to(node)
    if given is None or not is_buffer(given.source) or not is_as_made(node):
        return None
    flag = given.example
    if not may_look(flag) or flag.numel() != 1:
        return None
    found = bool(flag)
    hold_while(_is_flag, given.source, f"it is {'not ' * (not found)}set", found)
    return found


def _is_flag(expected: bool, value: Tensor) -> bool:
    return may_look(value) and value.numel() == 1 and bool(value) is expected


CONTEXTS = (flags_known,)
