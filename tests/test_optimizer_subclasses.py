"""Optimizers that people write: subclasses, wrappers around another one, lists of their own."""

from __future__ import annotations

import copy
import functools
import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from training import FLOAT16, Mlp, X, Y, assert_skips, distance, overflow, same, scaled, snapshot

import amp_graph
from amp_graph import StepCounts

SCALED = scaled(2.0**10)


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Halving(SGD):
    """Calls its base class's step, and counts its own."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.calls += 1
        return loss


class Lookahead(Optimizer):
    """Zhang et al. (2019), as packages write it: an optimizer around another one."""

    def __init__(self, inner: Optimizer, every: int = 2):
        self.inner, self.every, self.count = inner, every, 0
        super().__init__(inner.param_groups, {})
        self.slow = [p.detach().clone() for g in inner.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.count += 1
        if self.count % self.every == 0:
            fast = [p for g in self.param_groups for p in g["params"]]
            for slow, p in zip(self.slow, fast, strict=False):
                slow.add_(p - slow, alpha=0.5)
                p.copy_(slow)
        return loss


@pytest.mark.parametrize("attached", [True, False])
def test_a_subclass_that_calls_its_base_is_counted_once(attached: bool) -> None:
    model = Mlp()
    optimizer = Halving(model.parameters(), lr=0.1, momentum=0.9)
    if attached:
        amp_graph.convert(model, optimizer, policy=SCALED)
    else:
        amp_graph.convert(model, policy=SCALED)
    assert_skips(model, optimizer, (True, False, True))
    assert amp_graph.step_counts(optimizer) == StepCounts(1, 2)
    assert amp_graph.scale_of(model).get_scale() == 2.0**8
    # A skipped step is not run, but the one by which an optimizer is found cannot be stopped.
    assert optimizer.calls == (1 if attached else 2)


@pytest.mark.parametrize("which", ["outer", "inner", "neither"])
def test_an_optimizer_around_another(which: str) -> None:
    model = Mlp()
    inner = SGD(model.parameters(), lr=0.1, momentum=0.9)
    outer = Lookahead(inner)
    amp_graph.convert(
        model, {"outer": [outer], "inner": [inner], "neither": []}[which], policy=SCALED
    )
    for overflows in (False, True, False, True):
        before = snapshot(model, inner), [s.clone() for s in outer.slow]
        outer.zero_grad()
        model(X).square().mean().backward()
        if overflows:
            overflow(model)
        outer.step()
        after = snapshot(model, inner), outer.slow
        assert same(after[0], before[0]) is overflows
        assert not overflows or same(after[1], before[1])
        assert all(p.isfinite().all() for p in model.parameters())
    assert amp_graph.scale_of(model).get_scale() == 2.0**8


class Own(Optimizer):
    """Keeps a list of its parameters besides param_groups, and steps those."""

    def __init__(self, parameters: Any):
        self.own = list(parameters)
        self.moments = [torch.zeros_like(p) for p in self.own]
        super().__init__(self.own, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert self.param_groups[0]["params"] == self.own
        for p, moment in zip(self.own, self.moments, strict=True):
            moment.mul_(0.9).add_(p.grad)
            p.sub_(moment, alpha=0.1)


@pytest.mark.parametrize("attached", [True, False])
def test_an_optimizer_with_a_list_of_its_own_skips_too(attached: bool) -> None:
    model = Mlp()
    optimizer = Own(model.parameters())
    if attached:
        amp_graph.convert(model, optimizer, policy=SCALED)
    else:
        amp_graph.convert(model, policy=SCALED)
    for overflows in (False, True, False, True):
        before = snapshot(model), [m.clone() for m in optimizer.moments]
        optimizer.zero_grad()
        model(X).square().mean().backward()
        if overflows:
            overflow(model)
        optimizer.step()
        assert same((snapshot(model), optimizer.moments), before) is overflows
    assert amp_graph.step_counts(optimizer) == StepCounts(2, 2)


class Named(SGD):
    """Calls its closure something else, and takes more after it."""

    def step(self, fn: Any = None, factor: float = 1.0) -> Any:  # type: ignore[override]
        loss = fn() if fn is not None else None
        self.factor = factor
        super().step()
        return loss


@pytest.mark.parametrize("is_attached", [True, False], ids=["attached", "found"])
def test_a_closure_by_another_name_goes_where_it_was_given(is_attached: bool) -> None:
    model = Mlp()
    optimizer = Named(model.parameters(), lr=0.1)
    amp_graph.convert(model, optimizer if is_attached else None, policy=SCALED)
    fails = False

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        if fails:
            overflow(model)
        return loss

    for number, fails in enumerate([False, True, False]):
        before = snapshot(model, optimizer)
        assert optimizer.step(closure, 1.0 + number) is not None
        assert same(snapshot(model, optimizer), before) is fails
        assert fails or optimizer.factor == 1.0 + number
    assert amp_graph.step_counts(optimizer) == StepCounts(stepped=2, skipped=1)


class WithoutInit(Optimizer):
    """Lookahead as torch_optimizer and pytorch_optimizer have it: no call of `__init__`."""

    def __init__(self, inner: Optimizer):
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, defaultdict(dict)
        self.slow = [p.detach().clone() for g in inner.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        parameters = [p for g in self.param_groups for p in g["params"]]
        for p, slow in zip(parameters, self.slow, strict=True):
            p.copy_(slow.lerp_(p, 0.5))
        return loss


@pytest.mark.parametrize("policy", ["bfloat16", SCALED])
def test_an_optimizer_that_does_not_call_init(policy: Any) -> None:
    model = Mlp()
    inner = SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = WithoutInit(inner)
    amp_graph.convert(model, optimizer, policy=policy)
    if policy is SCALED:
        assert_skips(model, optimizer, [False, True, False, True])
        assert "amp_graph" in optimizer.state_dict()
    else:
        before = snapshot(model, inner)
        model(X).square().mean().backward()
        optimizer.step()
        assert not same(snapshot(model, inner), before)


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization (Foret et al. 2021): weights move before the closure runs."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, {})
        self.inner = SGD(self.param_groups, lr=lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [p for g in self.param_groups for p in g["params"]]
        before = [p.clone() for p in parameters]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.add_(p.grad * 0.1 / norm)
        self.zero_grad()
        with torch.enable_grad():
            loss = closure(backward=True)
        for p, value in zip(parameters, before, strict=True):
            p.copy_(value)
        self.inner.step()
        return loss


@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
def test_an_optimizer_that_moves_the_weights_before_its_closure(given: bool) -> None:
    weights = []
    start = Mlp()
    for kind in ("plain", "converted"):
        model = copy.deepcopy(start)
        optimizer = Sam(model.parameters(), lr=0.5)
        if kind == "converted":
            amp_graph.convert(model, optimizer if given else None, policy=scaled(2.0**10))

        def closure(backward: bool = True, model: nn.Module = model, x: Tensor = X) -> Tensor:
            loss = (model(x) - Y).square().mean()
            model.zero_grad()
            loss.backward()
            return loss

        for _ in range(4):
            closure()
            optimizer.step(closure)
        if kind == "converted":
            kept = snapshot(model)
            closure()
            optimizer.step(functools.partial(closure, x=X * math.inf))
            assert same(snapshot(model), kept)
        weights.append([*model.parameters()])
    for p, q in zip(*weights, strict=True):
        assert distance(q, p) <= FLOAT16


class Bare(Optimizer):
    """Around another optimizer, as Lookahead is written in many a repository."""

    def __init__(self, inner: Optimizer):
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure=None):  # type: ignore[no-untyped-def,override]
        return self.inner.step(closure)


def test_an_optimizer_that_calls_no_init_leaves_its_class_alone() -> None:
    model, plain = nn.Linear(4, 4), nn.Linear(4, 4)
    given = Bare(SGD(model.parameters(), lr=0.1))
    amp_graph.convert(model, given, policy="float16")
    other = Bare(SGD(plain.parameters(), lr=0.1))
    for each, optimizer in ((model, given), (plain, other)):
        each(torch.ones(2, 4)).sum().backward()
        optimizer.step()


class Counted(SGD):
    """Counts its steps in its groups: as a number, as timm's LAMB and Adan do, and in a tensor."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["seen"] += 1
        return super().step(closure)


def test_what_is_kept_in_groups_is_put_back() -> None:
    """After an overflow in the very step in which the optimizer is found."""
    model, seen = Mlp(), torch.zeros(())
    optimizer = Counted([{"params": [*model.parameters()], "seen": seen}], lr=0.1)
    amp_graph.convert(model, policy=SCALED)
    (group,) = optimizer.param_groups
    before = {**group, "seen": seen.clone()}
    assert_skips(model, optimizer, [True])
    assert same(group, before) and group["seen"] is seen
    assert_skips(model, optimizer, [False, True])
    assert group["step"] == seen == 1
