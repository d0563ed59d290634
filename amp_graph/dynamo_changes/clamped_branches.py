"""A branch that brings back what is not finite does not end a graph.

    if not torch.isfinite(x).all():                             so do the detectors of transformers,
        bound = torch.finfo(x.dtype).max - 1000                 in each layer
        x = torch.clamp(x, min=-bound, max=bound)
    if torch.isinf(x).any() or torch.isnan(x).any(): ...        and so they did before version 5

In float32, bfloat16 and float64 the bound is the largest number there is, as 1000 less is rounded
to that. The clamp leaves finite numbers as they are, and is captured for all; not so in float16.

Private names of PyTorch used here; seen to work on 2.11, 2.13 and 2.14:

    torch._dynamo.variables.TensorVariable.call_method, .as_proxy             a value of the graph
    torch._dynamo.symbolic_convert.InstructionTranslatorBase.next_instruction, .f_code,
    .symbolic_locals
    torch._dynamo.bytecode_transformation.Instruction.offset
"""

from __future__ import annotations

import contextlib
import dis
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._dynamo.variables import ConstantVariable, TensorVariable

from amp_graph.dynamo_changes.replaced import method_inside

EXACT = (torch.float32, torch.bfloat16, torch.float64)
ASKED = {"all": (torch.isfinite,), "any": (torch.isinf, torch.isnan)}
BESIDE = {"CACHE", "EXTENDED_ARG", "NOP", "NOT_TAKEN", "TO_BOOL"}  # in some versions of Python


def clamped_branches_taken() -> contextlib.AbstractContextManager[None]:
    """Within, Dynamo takes such a branch."""
    return method_inside(TensorVariable, "call_method", _call_method)


def _call_method(method: Any, tensor: Any, frame: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    if name in ASKED and not any(args) and not any(kwargs.values()):
        node = tensor.as_proxy().node
        if node.target in ASKED[name] and _is_clamped(node.args[0], frame):
            return ConstantVariable.create(name == "any")
    return method(tensor, frame, name, *args, **kwargs)


def _is_clamped(asked: Any, frame: Any) -> bool:
    """Whether the frame branches now, to clamp what it has asked about."""
    if not isinstance(asked, fx.Node) or asked.meta["example_value"].dtype not in EXACT:
        return False
    steps = _steps(frame.f_code)
    name = _clamped_in(_branch(steps, frame.next_instruction.offset))
    value = frame.symbolic_locals[name].realize() if name in frame.symbolic_locals else None
    return isinstance(value, TensorVariable) and value.as_proxy().node is asked


class _Step(NamedTuple):
    """An instruction: the variables of its function that it is about, or what else it is."""

    offset: int
    name: str
    variables: tuple[str, ...]
    rest: Any


def _steps(code: CodeType) -> list[_Step]:
    found = []
    for step in dis.get_instructions(code):
        about = code.co_consts[step.arg or 0] if step.opname == "KW_NAMES" else step.argval
        variables: tuple[str, ...] = ()
        if "_FAST" in step.opname:  # of two at once in some versions
            variables, about = about if isinstance(about, tuple) else (about,), None
        if step.opname not in BESIDE:
            found.append(_Step(step.offset, step.opname, variables, about))
    return found


def _branch(steps: list[_Step], offset: int) -> list[_Step]:
    """What runs if the condition holds that is jumped by at an offset; empty if none is there."""
    at = {step.offset: number for number, step in enumerate(steps)}
    first = next(number for number, step in enumerate(steps) if step.offset >= offset)
    start, end = first + 1, _target(steps[first], at)
    if end and (after := _target(steps[end - 1], at)):  # where another condition follows an `or`
        start, end = end, after
    return steps[start:end]


def _target(step: _Step, at: dict[int, int]) -> int:
    return at.get(step.rest, 0) if step.name.startswith("POP_JUMP") else 0


def _clamped_in(steps: list[_Step]) -> str | None:
    """The variable that these steps clamp, if that is all they do."""
    if [(s.name, s.rest) for s in steps] != [(s.name, s.rest) for s in CLAMP]:
        return None
    pairs = {
        pair
        for step, known in zip(steps, CLAMP, strict=True)
        for pair in zip(known.variables, step.variables, strict=True)
    }
    return dict(pairs)["x"] if len(pairs) == 2 and len(dict(pairs)) == 2 else None


def _clamp(x: Tensor, bound: float) -> None:
    bound = torch.finfo(x.dtype).max - 1000
    x = torch.clamp(x, min=-bound, max=bound)


def _until_stored(steps: list[_Step]) -> list[_Step]:
    """A function's statements, without what begins it and returns."""
    last = max(number for number, step in enumerate(steps) if step.name.startswith("STORE"))
    return [step for step in steps[: last + 1] if step.name != "RESUME"]


CLAMP = _until_stored(_steps(_clamp.__code__))
