"""A branch on a flag that a module keeps in a buffer does not end the graph.

    self.register_buffer("initted", torch.tensor(False))       as vector quantizers and ActNorm do
    if self.initted: ...        if not self.initted: ...        if self.initialized == 0: ...
    if not self.initted.item(): ...

It depends on data, but Dynamo has the buffer that is given, and a guard can ask later ones, as the
model does. So there is a graph for each answer. A buffer that the graph has written to is asked by
the model.

Private names of PyTorch used here:

    torch._dynamo.symbolic_convert.InstructionTranslatorBase.stack
    torch._dynamo.variables.builder.GraphArg.source, .example    behind an input of the graph
    torch._dynamo.variables.TensorVariable.as_proxy, tensor.SymNodeVariable.as_proxy
"""

from __future__ import annotations

import contextlib
import opcode
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, fx
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._dynamo.variables.tensor import SymNodeVariable

from amp_graph.dynamo_changes.captured_instructions import Capture, instructions_through
from amp_graph.dynamo_changes.grown_buffers import is_buffer
from amp_graph.dynamo_changes.known_calls import given_to, may_look
from amp_graph.dynamo_changes.own_guards import hold_while
from amp_graph.dynamo_changes.unread import class_of_unread
from amp_graph.graphs.writes import is_as_made

# What asks for the truth of a value, and does not hand the value on.
ASKING = {
    number
    for name, number in opcode.opmap.items()
    if name in ("UNARY_NOT", "TO_BOOL")
    or (name.startswith("POP_JUMP") and name.endswith(("_IF_TRUE", "_IF_FALSE")))
}
COMPARISONS = {
    operator.eq: "==",
    operator.ne: "!=",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
}
# As methods: `__eq__` in torch 2.11, `eq` and the like under a mode, as of a default device.
METHODS = {name: test for test in COMPARISONS for name in (test.__name__, f"__{test.__name__}__")}


def flags_known() -> contextlib.AbstractContextManager[None]:
    """Within, such a flag is known where an instruction asks for it."""
    return instructions_through(_ask, ASKING)


def _ask(capture: Capture, frame: Any, instruction: Any) -> Any:
    found = _flag(frame.stack[-1])
    if found is not None:
        frame.stack[-1] = ConstantVariable.create(found)
    return capture(frame, instruction)


def _flag(variable: Any) -> bool | None:
    """Return whether a flag is set, which is guarded from then on; None of anything else."""
    kind = class_of_unread(variable)
    if kind is not None and not issubclass(kind, Tensor):
        return None  # which Dynamo may answer without reading it
    if not isinstance(variable := variable.realize(), (TensorVariable, SymNodeVariable)):
        return None
    node, question = _asked(variable.as_proxy().node)
    given = given_to(node)
    if given is None or not is_buffer(given.source) or not is_as_made(node):
        return None
    flag = given.example
    if not may_look(flag) or flag.numel() != 1:
        return None
    found = question.of(flag)
    hold_while(_is_flag, given.source, f"it is {'not ' * (not found)}{question}", found, question)
    return found


class _Question(NamedTuple):
    """A question about the number in a tensor: whether it is one, or how it compares with another.

    of_item: whether it is asked of the tensor's `item()`. Dynamo knows that, too, but leaves a
        `not` of it behind, of a number that the retrace does not know.
    """

    test: Callable[..., Any] = operator.truth
    numbers: tuple[float, ...] = ()
    of_item: bool = False

    def of(self, flag: Tensor) -> bool:
        return bool(self.test(flag.item() if self.of_item else flag, *self.numbers))

    def __str__(self) -> str:
        return " ".join([COMPARISONS.get(self.test, "set"), *map(str, self.numbers)])


def _asked(node: Any) -> tuple[fx.Node, _Question]:
    """Return the value that a question is about, and the question."""
    question = _Question()
    compared = METHODS.get(node.target, node.target)
    if node.op in ("call_function", "call_method") and compared in COMPARISONS:
        match node.args:
            case fx.Node() as value, int() | float() as number:
                node, question = value, _Question(compared, (number,))
    if node.op == "call_method" and node.target == "item":
        return node.args[0], question._replace(of_item=True)
    return node, question


def _is_flag(expected: bool, question: _Question, value: Tensor) -> bool:
    return may_look(value) and value.numel() == 1 and question.of(value) is expected


CONTEXTS = (flags_known,)
