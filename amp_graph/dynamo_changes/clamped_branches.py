"""A branch that clamps a value, if any of its numbers is not finite, does not end a graph.

    if not torch.isfinite(x).all():                             so do the detectors of transformers,
        bound = torch.finfo(x.dtype).max - 1000                 in each layer
        x = torch.clamp(x, min=-bound, max=bound)
    if torch.isinf(x).any() or torch.isnan(x).any(): ...        and so they did before version 5

In float32, bfloat16 and float64 the bound is rounded to the largest number there is, so that the
clamp leaves finite numbers as they are: it is captured whether any is not finite or not. In float16
the graph ends as ever. Since the clamp returns another tensor, it is captured only of a new value
that has no other name, and where nothing else reads what the branch sets.

Private names of PyTorch used here:

    torch._dynamo.variables.TensorVariable.call_method, .as_proxy             a value of the graph
    torch._dynamo.symbolic_convert.InstructionTranslatorBase.instructions, .next_instruction,
    .symbolic_locals, .stack, .parent, .output.side_effects
    torch._dynamo.bytecode_transformation.Instruction, cleaned_instructions
    torch._dynamo.side_effects.SideEffects.id_to_variable, .store_attr_mutations
    torch._dynamo.variables.VariableTracker.visit                   to look for another name
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._dynamo.bytecode_transformation import Instruction, cleaned_instructions
from torch._dynamo.variables import (
    ConstantVariable,
    TensorVariable,
    VariableTracker,
)

from amp_graph.dynamo_changes.unread import is_read_tensor
from amp_graph.graphs.writes import is_as_made

EXACT = (torch.float32, torch.bfloat16, torch.float64)
ASKED = {"all": torch.isfinite, "any": torch.isinf}
BESIDE = {"CACHE", "EXTENDED_ARG", "NOP", "NOT_TAKEN", "TO_BOOL"}  # in some versions of Python


def _call_method(method: Any, tensor: Any, frame: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    if name in ASKED and not any(args) and not any(kwargs.values()):
        node = tensor.as_proxy().node
        if node.target is ASKED[name] and _is_new(node) and _is_clamped(node.args[0], frame):
            return ConstantVariable.create(name == "any")
    return method(tensor, frame, name, *args, **kwargs)


def _is_new(question: fx.Node) -> bool:
    """Whether the branch asks about a value that was made in the graph, in memory of its own, and
    of which nothing else was made; if autograd recorded it, that counts as well."""
    asked = question.args[0]
    if not isinstance(asked, fx.Node) or asked.op == "placeholder" or len(asked.users) > 1:
        return False
    value = asked.meta["example_value"]
    is_recorded = torch.is_grad_enabled() or not value.requires_grad
    is_own = value._base is None and is_as_made(asked) and is_as_made(question)
    return value.dtype in EXACT and is_recorded and is_own


def _is_clamped(asked: fx.Node, frame: Any) -> bool:
    """Whether the frame branches now, to clamp the value that it has asked about."""
    steps = _steps(frame.instructions)
    names = _clamped_in(_branch(steps, frame.next_instruction.offset))
    if names is None or names["x"] not in frame.symbolic_locals:
        return False
    value = frame.symbolic_locals[names["x"]].realize()
    is_asked = isinstance(value, TensorVariable) and value.as_proxy().node is asked
    return is_asked and not _is_read(steps, names["bound"]) and _names(asked, frame) == 1


def _names(asked: fx.Node, frame: Any) -> int:
    """Return how many variables stand for a value: in the frame, in those around it, and in pending
    writes to objects."""
    found, changes = [], frame.output.side_effects
    frames = [frame]
    while (around := getattr(frames[-1], "parent", None)) is not None:
        frames.append(around)

    def note(variable: Any) -> None:
        if is_read_tensor(variable) and variable.as_proxy().node is asked:
            found.append(variable)

    places = [place for f in frames for place in (*f.symbolic_locals.values(), *f.stack)]
    places += [v for v in changes.id_to_variable.values() if not is_read_tensor(v)]
    places += [v for written in changes.store_attr_mutations.values() for v in written.values()]
    for place in places:
        VariableTracker.visit(note, place)
    return len(found)


class _Step(NamedTuple):
    """An instruction: its name, the variables of its function that it is about, and other
    arguments."""

    offset: int
    name: str
    variables: tuple[str, ...]
    rest: Any


def _steps(instructions: Iterable[Instruction]) -> list[_Step]:
    found = []
    for step in instructions:
        about = step.argval if step.target is None else step.target.offset
        variables: tuple[str, ...] = ()
        if "_FAST" in step.opname:  # of two at once in some versions
            variables, about = about if isinstance(about, tuple) else (about,), None
        if step.opname not in BESIDE:
            found.append(_Step(step.offset or 0, step.opname, variables, about))
    return found


def _branch(steps: list[_Step], offset: int) -> list[_Step]:
    """Return the instructions that run if the condition of the jump at an offset holds; empty if
    there is no jump."""
    at = {step.offset: number for number, step in enumerate(steps)}
    first = next((number for number, step in enumerate(steps) if step.offset >= offset), 0)
    start, end = first + 1, _target(steps[first], at)
    if end and (after := _target(steps[end - 1], at)):  # where another condition follows an `or`
        start, end = end, after
    return steps[start:end]


def _target(step: _Step, at: dict[int, int]) -> int:
    return at.get(step.rest, 0) if step.name.startswith("POP_JUMP") else 0


def _clamped_in(steps: list[_Step]) -> dict[str, str] | None:
    """Return these instructions' names for the variables of `_clamp`, if they do the same; else
    None."""
    if [(s.name, s.rest) for s in steps] != [(s.name, s.rest) for s in CLAMP]:
        return None
    pairs = {
        pair
        for step, known in zip(steps, CLAMP, strict=True)
        for pair in zip(known.variables, step.variables, strict=True)
    }
    names = dict(pairs)
    return names if len(pairs) == len(names) == len({*names.values()}) else None


def _is_read(steps: list[_Step], bound: str) -> bool:
    """Whether a bound is a variable of the function elsewhere than in such branches."""
    inside: set[int] = set()
    for start in range(len(steps) - len(CLAMP) + 1):
        part = range(start, start + len(CLAMP))
        if _clamped_in(steps[start : part.stop]) is not None:
            inside.update(part)
    return any(bound in s.variables for n, s in enumerate(steps) if n not in inside)


def _clamp(x: Tensor, bound: float) -> None:
    bound = torch.finfo(x.dtype).max - 1000
    x = torch.clamp(x, min=-bound, max=bound)


def _until_stored(steps: list[_Step]) -> list[_Step]:
    """Return a function's instructions, without those that begin it and return."""
    last = max(number for number, step in enumerate(steps) if step.name.startswith("STORE"))
    return [step for step in steps[: last + 1] if step.name != "RESUME"]


CHANGES = ((TensorVariable, "call_method", _call_method),)
CLAMP = _until_stored(_steps(cleaned_instructions(_clamp.__code__)))
