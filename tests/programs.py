"""Random programs on small tensors: what they are made of, and a hypothesis strategy for them.

A program is a list of steps, each an operator of a table applied to values made before it. It is
drawn by running it: a step that raises, in forward or backward, or whose numbers grow, is left
out, so that every program drawn is one that PyTorch runs in float32.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from program_steps import CAPTURED, KINKED, SMOOTH, N
from torch import Tensor

MAX_STEPS = 16
TRIES = 12  # operands tried for an operator before it is left out
LIMIT = 30.0  # numbers beyond it make tolerances meaningless
Step = tuple[str, tuple[int, ...]]


OPERATORS = {**SMOOTH, **KINKED, **CAPTURED}
IN_PLACE = [name for name in (*SMOOTH, *KINKED) if name.endswith("_")] + ["setitem", "out"]
PRODUCTS = ["matmul", "linear", "addmm", "baddbmm", "attention"]
GROUPS = [[*SMOOTH, *KINKED], IN_PLACE, [*KINKED], PRODUCTS, [*SMOOTH]]
GROUPS_FOR_DYNAMO = [*GROUPS, [*CAPTURED], [*CAPTURED]]
OPERANDS = {name: tuple(inspect.signature(f).parameters) for name, f in OPERATORS.items()}


@dataclass(frozen=True)
class Program:
    """Steps over a list of values, which starts as the inputs and grows by every result.

    inputs: what each input is, a key of INPUTS. outputs: the values returned.
    """

    inputs: tuple[str, ...]
    steps: tuple[Step, ...] = ()
    outputs: tuple[int, ...] = ()

    def values(self, inputs: Sequence[Tensor], after: Callable[[Tensor], None]) -> list[Any]:
        values = list(inputs)
        for name, operands in self.steps:
            result = OPERATORS[name](*(values[i] for i in operands))
            results = result if isinstance(result, (tuple, list)) else [result]
            for tensor in (r for r in results if r is not None):
                after(tensor)
                values.append(tensor)
        return values

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values = self.values(inputs, after=lambda tensor: None)
        return tuple(values[i] for i in self.outputs)

    def rounded(self, dtype: torch.dtype) -> Callable[..., tuple[Tensor, ...]]:
        """The program with every float32 number on the way rounded, also in backward."""

        def after(tensor: Tensor) -> None:
            overlaps = torch._debug_has_internal_overlap(tensor) == 1  # expanded, so rounded before
            if tensor.dtype is torch.float32 and not overlaps:
                tensor.data.copy_(tensor.data.to(dtype))
                if tensor.requires_grad:
                    tensor.register_hook(lambda g: None if g is None else g.to(dtype).to(g.dtype))

        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            values = self.values([_rounded(x, dtype) for x in inputs], after)
            return tuple(values[i] for i in self.outputs)

        return run

    @property
    def has_kinks(self) -> bool:
        return any(name in KINKED for name, _ in self.steps)

    @property
    def writes_unseen(self) -> bool:
        """Whether it writes where autograd does not look: into what backward may read again."""
        return any(name.startswith("data") and name.endswith("_") for name, _ in self.steps)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 input that may be differentiated is rounded in a copy, any other where it is."""
    if x.dtype is not torch.float32:
        return x
    if x.requires_grad:
        return x.to(dtype).to(x.dtype)
    x.copy_(x.to(dtype))
    return x


def _uniform(*shape: int) -> Tensor:
    return torch.rand(shape) * 2 - 1


INPUTS: dict[str, Callable[[], Tensor]] = {
    "weight": lambda: _uniform(N, N).requires_grad_(),
    "bias": lambda: _uniform(N).requires_grad_(),
    "batch": lambda: _uniform(2, N, N).requires_grad_(),
    "scalar": lambda: _uniform().requires_grad_(),
    "buffer": lambda: _uniform(N, N),
    "integers": lambda: torch.randint(0, N, (N, N)),
    "mask": lambda: torch.rand(N, N) < 0.5,
    "double": lambda: _uniform(N, N).double(),
    "half": lambda: _uniform(N).half(),
}


def make_inputs(program: Program) -> list[Tensor]:
    """The same numbers at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [INPUTS[kind]() for kind in program.inputs]


def loss(outputs: Sequence[Tensor]) -> Tensor | None:
    """A weighted sum of all outputs that can be differentiated."""
    terms = []
    for output in outputs:
        if output.requires_grad:
            weights = torch.linspace(0.5, 1.5, max(output.numel(), 1), dtype=torch.float64)
            terms.append((output.double().reshape(-1) * weights[: output.numel()]).sum())
    return sum(terms[1:], terms[0]) if terms else None


def gradients(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor | None]:
    total = loss(outputs)
    leaves = [x for x in inputs if x.requires_grad]
    if total is None:
        return [None for _ in leaves]
    return list(torch.autograd.grad(total, leaves, allow_unused=True))


@st.composite
def programs(draw: st.DrawFn, groups: Sequence[Sequence[str]] = GROUPS) -> Program:
    kinds = ["weight", *draw(st.lists(st.sampled_from([*INPUTS]), min_size=1, max_size=4))]
    program = Program((*kinds, "weight", "integers", "mask"), (("matmul", (0, len(kinds))),))
    values = _values_if_sound(program)
    for group in draw(st.lists(st.sampled_from([*groups, None]), min_size=4, max_size=MAX_STEPS)):
        if group is None:  # an earlier step once more, perhaps on memory written since
            candidates = [draw(st.sampled_from(program.steps))]
        else:
            name = draw(st.sampled_from(group))
            choices = [*itertools.product(*(_fitting(values, role) for role in OPERANDS[name]))]
            start = draw(st.integers(0, len(choices) - 1)) if choices else 0
            candidates = [(name, c) for c in (choices[start:] + choices[:start])[:TRIES]]
        for step in candidates:
            longer = Program(program.inputs, (*program.steps, step))
            found = _values_if_sound(longer)
            if found is not None:
                program, values = longer, found
                break
    return replace(program, outputs=draw(_outputs(program, values)))


def _outputs(program: Program, values: Sequence[Tensor]) -> st.SearchStrategy[tuple[int, ...]]:
    """One value of each piece of memory made, the last one among them, or any values at all."""
    made = range(len(program.inputs), len(values))
    apart = [*{values[i].untyped_storage()._cdata: i for i in made}.values()]
    several = st.lists(st.sampled_from(apart), min_size=1, max_size=4, unique=True)
    anything = st.lists(st.sampled_from(range(len(values))), min_size=1, max_size=3)
    chosen = st.one_of(several, several, several, anything)
    return chosen.map(lambda indices: tuple(dict.fromkeys([apart[-1], *indices])))


def _fitting(values: Sequence[Tensor], role: str) -> list[int]:
    """The values that may take a role, the most recent first."""
    if role == "m":
        fitting = [i for i, v in enumerate(values) if v.dtype is torch.bool]
    elif role == "i":
        fitting = [i for i, v in enumerate(values) if v.dtype is torch.int64]
    else:
        fitting = [i for i, v in enumerate(values) if v.dtype is not torch.bool]
    return fitting[::-1]


def _values_if_sound(program: Program) -> list[Tensor] | None:
    inputs = make_inputs(program)
    try:
        values = program.values(inputs, after=lambda tensor: None)
        gradients(inputs, values)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None
    floats = [v.detach().double() for v in values if v.is_floating_point() and v.numel()]
    sound = all(torch.isfinite(v).all() and v.abs().max() < LIMIT for v in floats)
    return values if sound else None
