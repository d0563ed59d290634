"""A comparison that depends on data, and that nothing depends on, does not end a graph.

    length = visible.shape[1]                                    of what a mask selected
    is_causal = length > 1 and mask is None and is_causal        of attention that is not causal
    if length > 1 and is_causal: ...                             the same

Such a length is not known while a model is captured. If a condition behind it is known to be False,
so is the whole, and nobody asks how long it is.

Private names of PyTorch used here:

    torch._dynamo.symbolic_convert.InstructionTranslatorBase.instructions, .current_instruction,
    .next_instruction, .symbolic_locals
    torch._dynamo.bytecode_transformation.Instruction
    torch._dynamo.variables.tensor.SymNodeVariable.sym_num
    torch.fx.experimental.symbolic_shapes.has_free_unbacked_symbols
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._dynamo.bytecode_transformation import Instruction
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

BESIDE = {"CACHE", "EXTENDED_ARG", "NOP", "NOT_TAKEN", "TO_BOOL"}  # in some versions of Python


def _compare(capture: Callable[..., Any], frame: Any, args: Any, kwargs: Any) -> Any:
    found = capture(frame, args, kwargs)
    is_symbol = isinstance(found, SymNodeVariable) and isinstance(found.sym_num, torch.SymBool)
    if is_symbol and has_free_unbacked_symbols(found.sym_num) and _is_moot(frame):
        return ConstantVariable.create(False)
    return found


def _is_moot(frame: Any) -> bool:
    """Whether the frame compares now in the first of several conditions joined by `and`, of which
    another is False."""
    if frame.current_instruction.opname != "COMPARE_OP":
        return False
    following = frame.instructions[frame.instructions.index(frame.next_instruction) :]
    jump = _jump([step for step in following if step.opname not in BESIDE])
    return jump is not None and not jump.on and _is_taken(jump, frame)


class _Jump(NamedTuple):
    """A jump over the conditions that follow.

    end: where it leads.
    keeps: whether it keeps the condition, as the value of the whole.
    on: whether it is taken if the condition holds, or if it does not.
    steps: the instructions behind it.
    """

    end: Instruction | None
    keeps: bool
    on: bool
    steps: list[Instruction]


def _jump(steps: list[Instruction]) -> _Jump | None:
    match [step.opname for step in steps[:3]]:
        case ["JUMP_IF_FALSE_OR_POP", *_]:
            return _Jump(steps[0].target, True, False, steps[1:])
        case ["COPY", "POP_JUMP_IF_FALSE", "POP_TOP"]:  # since Python 3.12
            return _Jump(steps[1].target, True, False, steps[3:])
        case [name, *_] if name.startswith("POP_JUMP"):
            return _Jump(steps[0].target, False, name.endswith("_TRUE"), steps[1:])
    return None


def _is_taken(jump: _Jump, frame: Any) -> bool:
    """Whether one of the following conditions leads to the same end, with the same value, and all
    before it are booleans."""
    match [step.opname for step in jump.steps[:3]]:
        case [_, "LOAD_CONST", "IS_OP"]:  # so Dynamo spells jumps if something is None, too
            value, behind = None, jump.steps[3:]
        case _:
            value, behind = _boolean(jump.steps[0], frame), jump.steps[1:]
            if value is None:
                return False
    if jump.keeps and value is False and behind[0] is jump.end:
        return True
    following = _jump(behind)
    if following is None or following[:2] != jump[:2]:
        return False
    return value is following.on or _is_taken(following, frame)


def _boolean(step: Instruction, frame: Any) -> bool | None:
    """Return the value of the variable that an instruction loads, if it is a boolean that is known;
    else None."""
    if not step.opname.startswith("LOAD_FAST") or step.argval not in frame.symbolic_locals:
        return None
    variable = frame.symbolic_locals[step.argval].realize()
    value = variable.value if isinstance(variable, ConstantVariable) else None
    return value if isinstance(value, bool) else None


COMPARES = dict.fromkeys(("<=", "==", "!=", ">", ">="), _compare)
