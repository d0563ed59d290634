"""Optimizers that make passes inside of steps that get no closure."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from training import FLOAT16, Mlp, X, distance, overflow, same, scaled, snapshot

import amp_graph
from amp_graph import StepCounts
from amp_graph.optimizers import step_guard
from amp_graph.steps import inner_passes

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "no_other_scales")
HUGE = 1e9  # times a loss, whose gradients are then beyond float16


def parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class Evaluating(Optimizer):
    """What is to be evaluated is in `evaluate`."""

    def __init__(self, params: Any):
        super().__init__(params, {})
        self.evaluate: Callable[[], None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        with torch.enable_grad():
            self.evaluate()
        for p in parameters(self):
            self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
            p.sub_(p.grad, alpha=0.1)


class Sharp(Evaluating):
    """As GSAM: moves the weights, evaluates once more, and has another optimizer step."""

    def __init__(self, base: Optimizer):
        super().__init__(base.param_groups)
        self.base = base

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        with torch.enable_grad():
            self.evaluate()
        norm = torch.stack([p.grad.norm() for p in parameters(self)]).norm()
        for p in parameters(self):
            self.state[p]["moved"] = p.grad * 0.01 / norm
            p.add_(self.state[p]["moved"])
        with torch.enable_grad():
            self.evaluate()
        for p in parameters(self):
            p.sub_(self.state[p].pop("moved"))
        self.base.step()


class Ahead(Evaluating):
    """Moves the weights, and counts, before it evaluates anything."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in parameters(self):
            self.state[p]["seen"] = self.state[p].get("seen", 0) + 1
            p.add_(0.01)
        super().step()
        for p in parameters(self):
            p.sub_(0.01)


class Beside(Evaluating):
    """Has another optimizer step as well, for other parameters."""

    def __init__(self, params: Any, other: Optimizer):
        super().__init__(params)
        self.other = other

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.other.step()


class Curved(Optimizer):
    """As AdaHessian: divides by what it finds of the second derivative."""

    def __init__(self, params: Any):
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        own = parameters(self)
        gradients = [p.grad for p in own]
        curvature = torch.autograd.grad(gradients, own, [torch.ones_like(g) for g in gradients])
        with torch.no_grad():
            for p, curved in zip(own, curvature, strict=True):
                self.state[p]["curvature"] = curved
                p.sub_(p.grad / (1 + curved.abs() + 0 * curved), alpha=0.1)


def evaluation(
    model: nn.Module, of: Optimizer | nn.Module, times: float, to_none: bool = True
) -> Callable[[], None]:
    def evaluate() -> None:
        of.zero_grad(set_to_none=to_none)
        (model(X).square().mean() * times).backward()

    return evaluate


MAKE: dict[str, Callable[[Any], tuple[Optimizer, ...]]] = {
    "one that steps itself": lambda p: (Evaluating(p),),
    "around another": lambda p: (Sharp(base := AdamW(p, lr=0.01)), base),
    "around a fused one": lambda p: (Sharp(base := AdamW(p, lr=0.01, fused=True)), base),
}


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("how", ["given", "found", "unmodified"])
@pytest.mark.parametrize("name", MAKE)
def test_steps_that_overflow_are_undone_and_the_first_as_well(
    start: Any, name: str, how: str, to_none: bool
) -> None:
    if how == "unmodified":
        start(DTYPE="float16", LOSS_SCALE="256")
    model = Mlp()
    plain = copy.deepcopy(model)
    optimizers, plain_ones = MAKE[name](model.parameters()), MAKE[name](plain.parameters())
    if how != "unmodified":
        amp_graph.convert(model, [optimizers[0]] if how == "given" else [], policy=scaled(2.0**8))
    for overflows in (True, True, False, True, False, True):
        before = snapshot(model, *optimizers)
        optimizers[0].evaluate = evaluation(model, optimizers[0], HUGE if overflows else 1, to_none)
        optimizers[0].step()
        assert all(p.isfinite().all() for p in model.parameters())
        if overflows and not optimizers[-1].defaults.get("fused"):
            assert same(snapshot(model, *optimizers), before)
        elif overflows:  # which makes its state, of zeros, in a step that it skips
            assert same(snapshot(model), before[:1])
        else:
            plain_ones[0].evaluate = evaluation(plain, plain_ones[0], 1)
            plain_ones[0].step()
    assert amp_graph.step_counts(optimizers[0]) == StepCounts(stepped=2, skipped=4)
    if how != "unmodified":
        assert amp_graph.scale_of(model).get_scale() == 2.0**4
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert distance(p, q) < FLOAT16


def test_one_that_moves_the_weights_first_is_known_after_a_step() -> None:
    model = Mlp()
    optimizer = Ahead(model.parameters())
    amp_graph.convert(model, optimizer, policy=scaled(2.0**8))
    for overflows in (False, True, False, True):
        before = snapshot(model, optimizer)
        optimizer.evaluate = evaluation(model, optimizer, HUGE if overflows else 1)
        assert optimizer.step() is not overflows
        assert same(snapshot(model, optimizer), before) is overflows
    scale = amp_graph.scale_of(model)
    assert scale is not None and not scale.checked.hearing  # each step lets go of what it heard


@pytest.mark.parametrize("is_before", [True, False])
def test_two_that_step_together_skip_together(is_before: bool) -> None:
    """Be it for a pass whose gradients are no more, or for those of the other one alone."""
    model = Mlp()
    other = AdamW(model.second.parameters(), lr=0.01)
    optimizer = Beside(model.first.parameters(), other)
    amp_graph.convert(model, [optimizer, other], policy=scaled(2.0**8))
    for overflows in (False, True, False):

        def evaluate(overflows: bool = overflows) -> None:
            for times in (HUGE if overflows and is_before else 1, 1):
                evaluation(model, model, times)()
            if overflows and not is_before:
                overflow(model.second)

        before = snapshot(model, optimizer, other)
        optimizer.evaluate = evaluate
        assert optimizer.step() is not overflows
        assert same(snapshot(model, optimizer, other), before) is overflows


def test_a_curvature_beyond_float16_is_skipped() -> None:
    """Though the gradients that the step began with are not."""
    model = Mlp()
    optimizer = Curved(model.parameters())
    amp_graph.convert(model, optimizer, policy=scaled(2.0**4))
    for overflows in (False, True, False):
        optimizer.zero_grad()
        loss = model(X * 30).square().sum() * (3e4 if overflows else 1e-2)
        loss.backward(create_graph=True)
        assert all(p.grad.isfinite().all() for p in model.parameters())
        before = snapshot(model)
        assert optimizer.step() is not overflows
        assert same(snapshot(model), before) is overflows
        assert all(p.isfinite().all() for p in model.parameters())
    assert amp_graph.scale_of(model).get_scale() == 2.0**3


class Quiet(SGD):
    """Makes no passes."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", [SGD, Quiet])
def test_nothing_is_copied_for_one_that_makes_no_passes(
    kind: type[SGD], fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody waits for a fused one."""

    def refused(*_: Any) -> None:
        raise AssertionError("copied")

    monkeypatch.setattr(inner_passes, "Undo", refused)
    monkeypatch.setattr(step_guard, "Undo", refused)
    model = Mlp()
    optimizer = kind(model.parameters(), lr=0.1, fused=fused)
    amp_graph.convert(model, optimizer, policy=scaled(2.0**8))
    for _ in range(3):
        model(X).square().mean().backward()
        stepped = optimizer.step()
        assert stepped and isinstance(stepped, torch.Tensor) is fused


@pytest.mark.parametrize("given", [True, False])
def test_a_step_that_raised_is_over(given: bool) -> None:
    model = Mlp()
    optimizer = Evaluating(model.parameters())
    amp_graph.convert(model, [optimizer] if given else [], policy=scaled(2.0**8))

    def interrupted() -> None:
        evaluation(model, optimizer, 1)()
        raise KeyboardInterrupt

    optimizer.evaluate = interrupted
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    model(X)
    assert not inner_passes._under_way
