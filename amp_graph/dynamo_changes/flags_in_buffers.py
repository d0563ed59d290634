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
from typing import Any

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
    node, test, numbers, of_item = _asked(variable.as_proxy().node)
    given = given_to(node)
    if given is None or not is_buffer(given.source) or not is_as_made(node):
        return None
    flag = given.example
    if not may_look(flag) or flag.numel() != 1:
        return None
    question = test, numbers, of_item
    found = _answer(flag, *question)
    what = " ".join([COMPARISONS.get(test, "set"), *map(str, numbers)])
    hold_while(_is_flag, given.source, f"it is {'not ' * (not found)}{what}", found, *question)
    return found


def _asked(node: Any) -> tuple[fx.Node, Callable[..., Any], tuple[float, ...], bool]:
    """Return the value whose truth, or that of its comparison with a number, is asked for, how, and
    whether it is asked of its `item()`. Dynamo knows that, too, but leaves a `not` of it behind, of
    a number that the retrace does not know."""
    test: Callable[..., Any] = operator.truth
    numbers: tuple[float, ...] = ()
    compared = METHODS.get(node.target, node.target)
    if node.op in ("call_function", "call_method") and compared in COMPARISONS:
        value, number = node.args
        if isinstance(value, fx.Node) and isinstance(number, (int, float)):
            node, test, numbers = value, compared, (number,)
    if node.op == "call_method" and node.target == "item":
        return node.args[0], test, numbers, True
    return node, test, numbers, False


def _answer(flag: Tensor, test: Callable[..., Any], numbers: Any, of_item: bool) -> bool:
    return bool(test(flag.item() if of_item else flag, *numbers))


def _is_flag(
    expected: bool, test: Callable[..., Any], numbers: Any, of_item: bool, value: Tensor
) -> bool:
    is_one = may_look(value) and value.numel() == 1
    return is_one and _answer(value, test, numbers, of_item) is expected


CONTEXTS = (flags_known,)
