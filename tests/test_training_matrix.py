"""Mixed training against a float32 reference that skips the same steps, over many kinds of loop.

    1-3 models x 1-2 losses x 1-2 optimizers x kind of optimizer x kind of loop x injection

The product has 1,728 cases. Tested are so many, drawn with a fixed seed, that every pair of values
of any two dimensions occurs, and forty more. The reference is the same script on unconverted
copies; an infinity is put into both, and the reference leaves out the steps of those it reached.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint
from training import FLOAT16, distance, is_fresh, same, scaled

import amp_graph

DIMENSIONS: dict[str, list[Any]] = {
    "models": [1, 2, 3],
    "losses": [1, 2],
    "optimizers": [1, 2],
    "kind": ["SGD", "AdamW foreach", "AdamW fused", "LBFGS", "by .data", "raw"],
    "loop": ["plain", "clip", "accumulate 4", "checkpoint"],
    "inject": ["forward", "gradient"],
    "at": [0, 1, 3],
}
STEPS = 4
START = 2.0**10  # at which nothing overflows but what was injected
SCALED = scaled(START)
TOLERANCE = 4 * FLOAT16  # gradients at weights that differ by the roundings of earlier steps


@dataclass(frozen=True)
class Case:
    models: int
    losses: int
    optimizers: int
    kind: str
    loop: str
    inject: str
    at: int

    def __str__(self) -> str:
        counts = f"{self.models} models {self.losses} losses {self.optimizers} optimizers"
        return f"{self.kind}, {self.loop}, {counts}, inf in {self.inject} at {self.at}"


def covering() -> Iterator[Case]:
    """Cases in which every pair of values occurs; greedy, from a fixed seed."""
    random_ = random.Random(3)
    names = list(DIMENSIONS)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in DIMENSIONS[a]
        for y in DIMENSIONS[b]
    }
    while missing:
        drawn = [
            {name: random_.choice(DIMENSIONS[name]) for name in names} | dict(next(iter_))
            for iter_ in (iter([pair]) for pair in random_.sample(sorted(missing, key=str), 1) * 40)
        ]
        pairs = [set(itertools.combinations(case.items(), 2)) & missing for case in drawn]
        best = max(range(len(drawn)), key=lambda i: len(pairs[i]))
        missing -= pairs[best]
        yield Case(**drawn[best])


def sample(size: int) -> list[Case]:
    product = [Case(*values) for values in itertools.product(*DIMENSIONS.values())]
    return random.Random(4).sample(product, size)


@pytest.fixture(scope="module", autouse=True)
def bystander() -> tuple[nn.Module, ...]:
    """All cases run beside a model out of which an overflow spilled long ago, and that lives."""
    front, model = nn.Linear(4, 4), amp_graph.convert(Block(), policy=scaled(START))
    model(front(torch.ones(2, 3, 4)) * math.inf).sum().backward()
    assert amp_graph.scale_of(model).spills.are_new_to(front)
    return front, model


CASES = list(dict.fromkeys([*covering(), *sample(40)]))


class Block(nn.Module):
    """Attention, a convolution, a norm, from a shape to the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mix = nn.Conv1d(3, 3, 1)
        self.query = nn.Linear(4, 4, bias=False)
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        scores = (self.query(h) @ h.transpose(1, 2)).softmax(-1)
        return x + self.out(torch.tanh(self.mix(scores @ h)))


class ByData(Optimizer):
    """Momentum as people write it by hand."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p.data))
                momentum.mul_(0.9).add_(p.grad.data)
                p.data.add_(momentum, alpha=-group["lr"])


MAKE: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9),
    # eps: or AdamW would blow the rounding of gradients near zero up to whole steps
    "AdamW foreach": lambda p: AdamW(p, lr=0.05, eps=1e-2, foreach=True),
    "AdamW fused": lambda p: AdamW(p, lr=0.05, eps=1e-2, fused=True),
    "LBFGS": lambda p: LBFGS(p, lr=0.1, max_iter=2, history_size=2),
    "by .data": lambda p: ByData(p, lr=0.1),
}


class Run:
    """A training script. `mixed`: converted; otherwise the float32 reference."""

    def __init__(self, case: Case, mixed: bool):
        torch.manual_seed(0)
        self.case, self.mixed = case, mixed
        self.models = [Block() for _ in range(case.models)]
        parameters = [p for m in self.models for p in m.parameters()]
        cut = len(parameters) // 2 if case.optimizers == 2 else len(parameters)
        self.parts = [part for part in (parameters[:cut], parameters[cut:]) if part]
        self.optimizers = [MAKE[case.kind](p) for p in self.parts if case.kind != "raw"]
        self.skips: list[list[bool]] = []
        self.gradients: list[list[Tensor]] = []
        self.step_now = -1
        for model in self.models if mixed else []:
            own = {id(p) for p in model.parameters()}
            its = [o for o, ps in zip(self.optimizers, self.parts, strict=False)
                   if any(id(p) in own for p in ps)]  # fmt: skip
            amp_graph.convert(model, its, policy=SCALED)
        self.models[-1].out.bias.register_hook(self._spoil_gradient)

    def _spoil_gradient(self, gradient: Tensor) -> Tensor:
        if self.case.inject == "gradient" and self.step_now == self.case.at:
            return gradient * math.inf
        return gradient

    def _losses(self, x: Tensor) -> list[Tensor]:
        if self.case.inject == "forward" and self.step_now == self.case.at:
            x = x * math.inf
        for model in self.models:
            whole = self.case.loop == "checkpoint"
            x = checkpoint(model, x, use_reentrant=True) if whole else model(x)
        return [x.square().mean(), (x - 1).abs().mean() * 0.1][: self.case.losses]

    def backward(self) -> Tensor:
        """Gradients of one step into `.grad`; the step's last loss."""
        for model in self.models:
            model.zero_grad()
        pieces = 4 if self.case.loop == "accumulate 4" else 1
        generator = torch.Generator().manual_seed(self.step_now)
        for _ in range(pieces):
            x = torch.randn(2, 3, 4, generator=generator).requires_grad_()
            losses = self._losses(x)
            for i, loss in enumerate(losses):
                (loss / pieces).backward(retain_graph=i + 1 < len(losses))
        if self.case.loop == "clip":
            nn.utils.clip_grad_norm_([p for ps in self.parts for p in ps], 0.5)
        if self.step_now == self.case.at:
            self.bad = {id(p) for ps in self.parts for p in ps if not p.grad.isfinite().all()}
        return losses[-1].detach()

    def backoffs(self, model: nn.Module) -> int:
        """How often a model's scale has to go down: once in a round in which an overflow spilled
        out of it into what comes before it, or in which its own gradients overflowed and no model
        spilled. A step with a closure is a round of its own, unless reentrant checkpointing hides
        its forwards. Nobody looks at what the first model gives its input, or what is given to
        such checkpoints."""
        own = {id(p) for p in model.parameters()} & self.bad
        spilling = self.models[1:] if self.case.loop != "checkpoint" else []
        if self.case.inject == "forward" and spilling:
            rounds = len(self.parts) if model in spilling else 0
        else:
            rounds = sum(any(id(p) in own for p in ps) for ps in self.parts)
        own_rounds = self.case.kind == "LBFGS" and self.case.loop != "checkpoint"
        return rounds if own_rounds else min(rounds, 1)

    def run(self) -> Run:
        for self.step_now in range(STEPS):
            if self.case.kind == "LBFGS":
                skips = [self._step_with_closure(i) for i in range(len(self.optimizers))]
            else:
                self.backward()
                self._note_gradients()
                steps = len(self.parts)
                skips = [self._step(i) for i in range(steps)]
                if self.mixed and self.case.kind == "raw":
                    skips = self._raw_mixed()
            self.skips.append(skips)
        return self

    def _note_gradients(self) -> None:
        self.gradients.append([p.grad.clone() for ps in self.parts for p in ps])

    def _overflowed(self, i: int) -> bool:
        return not all(p.grad.isfinite().all() for p in self.parts[i])

    def _step(self, i: int) -> bool:
        """Step one optimizer; whether it skipped. The reference looks, the mixed run is told."""
        if self.case.kind == "raw":
            return False if self.mixed else self._raw_reference(i)
        if not self.mixed and self._overflowed(i):
            return True
        before = copy.deepcopy(self.optimizers[i].state_dict()["state"])
        told = self.optimizers[i].step()
        skipped = self.mixed and not bool(told)
        if skipped:
            after = self.optimizers[i].state_dict()["state"]
            assert same(after, before) or (not before and is_fresh(after))
        return skipped

    def _raw_reference(self, i: int) -> bool:
        """A raw loop skips for whole models, for has_finite_gradients is about a model."""
        for model in self.models if i == 0 else []:
            if all(p.grad.isfinite().all() for p in model.parameters()):
                self._descend(model)
        return self._overflowed(i)

    def _raw_mixed(self) -> list[bool]:
        skips = [self._overflowed(i) for i in range(len(self.parts))]
        for model in self.models:
            if amp_graph.has_finite_gradients(model):
                self._descend(model)
        return skips

    @torch.no_grad()
    def _descend(self, model: nn.Module) -> None:
        for p in model.parameters():
            p -= 0.1 * p.grad

    def _step_with_closure(self, i: int) -> bool:
        if self.mixed:
            before = amp_graph.step_counts(self.optimizers[i]).skipped
            self.optimizers[i].step(self.backward)
            return amp_graph.step_counts(self.optimizers[i]).skipped > before
        self.backward()
        if self._overflowed(i):
            return True
        self.optimizers[i].step(self.backward)
        return False


def test_every_pair_of_values_occurs() -> None:
    pairs = {
        pair for case in CASES for pair in itertools.combinations(sorted(vars(case).items()), 2)
    }
    sizes = [len(values) for values in DIMENSIONS.values()]
    assert len(pairs) == sum(a * b for a, b in itertools.combinations(sizes, 2))
    assert 60 <= len(CASES) <= 80


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_is_float32_s_with_the_same_steps_skipped(case: Case) -> None:
    torch._dynamo.reset()
    reference, mixed = Run(case, False).run(), Run(case, True).run()
    assert mixed.skips == reference.skips
    assert any(map(any, mixed.skips)) and not all(map(all, mixed.skips))
    for step, (found, expected) in enumerate(
        zip(mixed.gradients, reference.gradients, strict=True)
    ):
        for value, truth in zip(found, expected, strict=True):
            assert value.isfinite().all() == truth.isfinite().all(), step
            if not truth.any():  # clipping by an infinite norm leaves zeros
                assert not value.any()
            elif truth.isfinite().all():
                assert distance(value, truth) <= TOLERANCE, step
    # LBFGS estimates curvature from differences of gradients, ten times smaller than they are.
    within = 10 * FLOAT16 if case.kind == "LBFGS" else TOLERANCE
    start = Run(case, False)
    trios = zip(*(itertools.chain(*run.parts) for run in (mixed, reference, start)), strict=True)
    for p, q, before in trios:
        assert torch.isfinite(p).all()
        assert distance(p - before, q - before) <= within
    scales = [amp_graph.scale_of(model).get_scale() for model in mixed.models]
    assert scales == [START / 2 ** reference.backoffs(model) for model in reference.models]
