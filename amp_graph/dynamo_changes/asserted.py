"""`assert` of a list, a dictionary or an object does not end a graph.

    assert layers, "there are none"     captured as `if not layers: raise AssertionError(...)`

Dynamo makes a check in the graph of it, for which it needs a tensor or a number.

Private names of PyTorch used here:

    torch._dynamo.config.rewrite_assert_with_torch_assert
    torch._dynamo.symbolic_convert.InstructionTranslatorBase.stack
    torch._dynamo.variables.TensorVariable, .tensor.SymNodeVariable     tensors and numbers
"""

from __future__ import annotations

import contextlib
import numbers
import opcode
from typing import Any

from torch import Tensor
from torch._dynamo import config
from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.tensor import SymNodeVariable

from amp_graph.dynamo_changes.captured_instructions import Capture, instructions_through
from amp_graph.dynamo_changes.unread import class_of_unread

# `assert` jumps over an error.
JUMPS = {
    number
    for name, number in opcode.opmap.items()
    if name.startswith("POP_JUMP") and name.endswith("_IF_TRUE")
}


def asserts_as_branches() -> contextlib.AbstractContextManager[None]:
    """Within, such an `assert` is captured as a branch."""
    return instructions_through(_jump, JUMPS)


def _jump(capture: Capture, frame: Any, instruction: Any) -> Any:
    if _is_tensor_or_number(frame.stack[-1]):
        return capture(frame, instruction)
    with config.patch(rewrite_assert_with_torch_assert=False):
        return capture(frame, instruction)


def _is_tensor_or_number(variable: Any) -> bool:
    kind = class_of_unread(variable)
    if kind is not None:
        return issubclass(kind, Tensor | numbers.Number)
    return isinstance(variable.realize(), TensorVariable | SymNodeVariable)


CONTEXTS = (asserts_as_branches,)
