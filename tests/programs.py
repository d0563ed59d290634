"""Random programs on small tensors: what they are made of, and a hypothesis strategy for them.

A program is a list of steps, each an operator of a table applied to values made before it. It is
drawn by running it: a step that raises, in forward or backward, or whose numbers grow, is left
out, so that every program drawn is one that PyTorch runs in float32.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

N = 4
MAX_STEPS = 16
TRIES = 12  # operands tried for an operator before it is left out
LIMIT = 30.0  # numbers beyond it make tolerances meaningless
Step = tuple[str, tuple[int, ...]]


def _setitem(x: Tensor, value: Tensor) -> None:
    x[..., 0] = value


def _indices(i: Tensor) -> Tensor:
    return i.long().reshape(-1)[:N] % 2


# Continuous everywhere, so that a rounded operand gives a slightly different result. Operands are
# told apart by name: i is an integer tensor, m a boolean one, the others anything.
SMOOTH: dict[str, Callable[..., Any]] = {
    "matmul": lambda x, y: x @ y / 2,
    "linear": lambda x, y: F.linear(x, y),
    "linear_bias": lambda x, y, z: F.linear(x, y, z) / 2,
    "addmm": lambda x, y, z: torch.addmm(x, y, z, alpha=0.5),
    "baddbmm": lambda x, y, z: torch.baddbmm(x, y, z, beta=0.5),
    "einsum": lambda x, y: torch.einsum("...ij,...kj->...ik", x, y) / 2,
    "attention": lambda x, y: F.scaled_dot_product_attention(x, y, y),
    "conv1d": lambda x, y: F.conv1d(x, y, padding=1) / 3,
    "add": lambda x, y: x + y,
    "add_alpha": lambda x, y: torch.add(x, y, alpha=-2),
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / (y * y + 1),
    "scale": lambda x: x * 0.7 + 1,
    "tanh": lambda x: torch.tanh(x),
    "gelu": lambda x: F.gelu(x),
    "sigmoid": lambda x: torch.sigmoid(x),
    "sqrt": lambda x: (x * x + 1).sqrt(),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "addcmul": lambda x, y, z: torch.addcmul(x, y, z, value=0.5),
    "avg_pool": lambda x: F.avg_pool1d(x, 2),
    "exp": lambda x: torch.exp(x.tanh()),
    "log": lambda x: torch.log(x * x + 1),
    "square": lambda x: x.tanh().pow(2),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "layer_norm": lambda x, y: F.layer_norm(x, (N,), y),
    "batch_norm": lambda x, y: F.batch_norm(x, None, None, y, training=True, eps=0.1),
    "sum": lambda x: x.sum(),
    "sum_dim": lambda x: x.sum(0, keepdim=True),
    "mean": lambda x: x.mean(-1),
    "var_mean": lambda x: torch.var_mean(x, -1, correction=0),
    "logsumexp": lambda x: x.logsumexp(-1, keepdim=True),
    "cumsum": lambda x: x.cumsum(-1),
    "transpose": lambda x: x.transpose(0, -1),
    "flatten": lambda x: x.reshape(-1),
    "view": lambda x: x.view(-1, N),
    "expand": lambda x: x.expand(2, *x.shape),
    "head": lambda x: x[..., :2],
    "row": lambda x: x[0],
    "unsqueeze": lambda x: x.unsqueeze(0),
    "diagonal": lambda x: x.diagonal(),
    "chunk": lambda x: x.chunk(2, -1),
    "split": lambda x: x.split([1, N - 1]),
    "unbind": lambda x: x.unbind(0),
    "cat": lambda x, y: torch.cat([x, y]),
    "cat_twice": lambda x, y: torch.cat([x, y, x], -1),
    "stack": lambda x, y: torch.stack([x, y]),
    "flip": lambda x: x.flip(0),
    "pad": lambda x: F.pad(x, (1, 1)),
    "tril": lambda x: x.tril(),
    "repeat": lambda x: x.repeat(2, 1),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "masked_fill": lambda x, m: x.masked_fill(m, 0.5),
    "where": lambda m, x, y: torch.where(m, x, y),
    "index_select": lambda x, i: x.index_select(0, _indices(i)),
    "gather": lambda x, i: x.gather(0, i.long().view(N, N) % 2),
    "index": lambda x, i: x[_indices(i)],
    "embedding": lambda x, i: F.embedding(i.long() % 2, x),
    "index_put": lambda x, i, y: x.index_put((_indices(i),), y, accumulate=True),
    "scatter_add": lambda x, i, y: x.scatter_add(0, i.long().view(N, N) % 2, y),
    "zeros_like": lambda x: torch.zeros_like(x),
    "new_ones": lambda x: x.new_ones(N) * 0.5,
    "factory": lambda x: torch.full((N, N), 0.25) + torch.arange(N),
    "double": lambda x: x.double(),
    "float": lambda x: x.float(),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.to(torch.bfloat16),
    "long": lambda i: i.long(),
    "type_as": lambda x, y: x.type_as(y) if y.is_floating_point() else x,
    "sum_in_double": lambda x: x.sum(-1, dtype=torch.float64),
    "softmax_in_float": lambda x: x.softmax(-1, dtype=torch.float32),
    "add_": lambda x, y: x.add_(y),
    "add_number_": lambda x: x.add_(0.5),
    "mul_": lambda x, y: x.mul_(y),
    "tanh_": lambda x: x.tanh_(),
    "exp_": lambda x: x.tanh_().exp_(),
    "neg_": lambda x: x.neg_(),
    "fill_": lambda x: x.fill_(0.5),
    "zero_row_": lambda x: x[0].zero_(),
    "copy_": lambda x, y: x.copy_(y),
    "masked_fill_": lambda x, m: x.masked_fill_(m, 0.5),
    "index_put_": lambda x, i, y: x.index_put_((_indices(i),), y),
    "index_add_": lambda x, i, y: x.index_add_(0, _indices(i), y),
    "setitem": _setitem,
    "scale_columns_": lambda x: x[..., 1:].mul_(0.5),
    "transpose_": lambda x: x.t().add_(x.new_ones(N)),
    "addmm_": lambda x, y: x.addmm_(y, y, alpha=0.3),
    "out": lambda x, y: torch.mul(x, y, out=torch.empty_like(x + y)),
}
# Continuous, with a gradient that jumps.
KINKED: dict[str, Callable[..., Any]] = {
    "relu": lambda x: x.relu(),
    "relu_": lambda x: x.relu_(),
    "abs": lambda x: x.abs(),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "maximum": lambda x, y: torch.where(x > y, x, y),
    "amax": lambda x: x.amax(-1, keepdim=True),
    "max": lambda x: x.max(-1).values,
    "topk": lambda x: x.topk(2).values,
    "sort": lambda x: x.sort(0).values,
    "max_pool": lambda x: F.max_pool1d(x, 2),
}
OPERATORS = {**SMOOTH, **KINKED}
IN_PLACE = [name for name in OPERATORS if name.endswith("_")] + ["setitem", "out"]
PRODUCTS = ["matmul", "linear", "addmm", "baddbmm", "attention"]
GROUPS = [[*OPERATORS], IN_PLACE, [*KINKED], PRODUCTS, [*SMOOTH]]
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
def programs(draw: st.DrawFn) -> Program:
    kinds = ["weight", *draw(st.lists(st.sampled_from([*INPUTS]), min_size=1, max_size=4))]
    program = Program((*kinds, "weight", "integers", "mask"), (("matmul", (0, len(kinds))),))
    values = _values_if_sound(program)
    for group in draw(st.lists(st.sampled_from(GROUPS), min_size=4, max_size=MAX_STEPS)):
        name = draw(st.sampled_from(group))
        choices = [*itertools.product(*(_fitting(values, role) for role in OPERANDS[name]))]
        start = draw(st.integers(0, len(choices) - 1)) if choices else 0
        for operands in (choices[start:] + choices[:start])[:TRIES]:
            longer = Program(program.inputs, (*program.steps, (name, operands)))
            found = _values_if_sound(longer)
            if found is not None:
                program, values = longer, found
                break
    made = list(range(len(program.inputs), len(values)))
    outputs = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
    if draw(st.integers(0, 9)) == 0:
        outputs.append(draw(st.integers(0, len(values) - 1)))
    return Program(program.inputs, program.steps, (made[-1], *outputs))


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
