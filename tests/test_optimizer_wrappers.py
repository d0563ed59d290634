"""What steps as an optimizer does and is none: wrappers with a `step()` and `param_groups`."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from training import Mlp, X, overflow, same, scaled, snapshot

import amp_graph
from amp_graph import AmpGraphError, StepCounts

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "no_other_scales")


class Wrapper:
    """As schedulefree's: decays the weights and averages them around the steps of another one."""

    def __init__(self, base: Any):
        self.base = base
        self.steps = 0
        self.mean = [p.detach().clone() for g in base.param_groups for p in g["params"]]

    @property
    def param_groups(self) -> Any:
        return self.base.param_groups

    @property
    def state(self) -> Any:
        return self.base.state

    def zero_grad(self) -> None:
        self.base.zero_grad()

    def state_dict(self) -> Any:
        return self.base.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.base.load_state_dict(state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        own = [p for group in self.param_groups for p in group["params"]]
        for p in own:
            p.mul_(0.99)
        self.base.step()
        self.steps += 1
        for p, mean in zip(own, self.mean, strict=True):
            mean.lerp_(p, 0.5)
        return loss


def made(given: bool = True, fused: bool = False) -> tuple[nn.Module, Any]:
    model = Mlp()
    wrapper: Any = Wrapper(AdamW(model.parameters(), lr=0.1, fused=fused))
    if given:
        assert amp_graph.convert(model, wrapper, policy=scaled(2.0**8))[1] is wrapper
    return model, wrapper


def backward(model: nn.Module, wrapper: Any, overflows: bool) -> None:
    wrapper.zero_grad()
    model(X).square().mean().backward()
    if overflows:
        overflow(model)


@pytest.mark.parametrize("fused", [False, True])
def test_all_of_a_step_is_skipped(fused: bool) -> None:
    model, wrapper = made(fused=fused)
    for overflows in (True, False, True, False):
        backward(model, wrapper, overflows)
        before = snapshot(model, wrapper.base), copy.deepcopy(wrapper.mean)
        assert wrapper.step() is not overflows
        assert same((snapshot(model, wrapper.base), wrapper.mean), before) is overflows
    assert wrapper.steps == 2
    assert amp_graph.step_counts(wrapper) == StepCounts(stepped=2, skipped=2)
    assert amp_graph.scale_of(model).get_scale() == 2.0**6


def test_an_overflow_in_its_closure() -> None:
    model, wrapper = made()
    for times in (1.0, 1e30, 1.0):

        def closure(times: float = times) -> Any:
            wrapper.zero_grad()
            loss = model(X).square().mean() * times
            loss.backward()
            return loss.detach()

        before = snapshot(model, wrapper.base)
        assert wrapper.step(closure) is not None
        assert same(snapshot(model, wrapper.base), before) is (times > 1)
    assert amp_graph.step_counts(wrapper) == StepCounts(stepped=2, skipped=1)


def test_the_scale_is_in_its_state_if_what_it_wraps_is_given_too() -> None:
    model, wrapper = made(given=False)
    amp_graph.convert(model, [wrapper, wrapper.base], policy=scaled(2.0**8))
    backward(model, wrapper, overflows=True)
    wrapper.step()
    again, other = made(given=False)
    amp_graph.convert(again, [other, other.base], policy=scaled(2.0**8))
    other.load_state_dict(wrapper.state_dict())
    assert amp_graph.scale_of(again).get_scale() == 2.0**7


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
def test_a_copy_has_the_step_of_its_class(copied: Any) -> None:
    model, wrapper = made()
    backward(model, wrapper, overflows=False)
    before, twin = snapshot(model), copied(wrapper)
    own = [p for group in twin.param_groups for p in group["params"]]
    for p in own:
        p.grad = torch.ones_like(p)
    values = copy.deepcopy(own)
    assert twin.step() is None
    assert not same(own, values) and same(snapshot(model), before)
    assert twin.steps == 1 and wrapper.steps == 0


def test_it_is_not_kept_alive() -> None:
    model, wrapper = made()
    backward(model, wrapper, overflows=False)
    wrapper.step()
    alive = weakref.ref(wrapper)
    del wrapper
    gc.collect()
    assert alive() is None


def test_what_is_refused() -> None:
    class Slotted:
        __slots__ = ("param_groups",)

        def step(self) -> None: ...

    model = Mlp()
    slotted = Slotted()
    slotted.param_groups = [{"params": [*model.parameters()]}]
    rate = torch.optim.lr_scheduler.StepLR(SGD(model.parameters(), lr=0.1), 1)
    for wrong in (slotted, rate, model):
        with pytest.raises(AmpGraphError, match="or what has step"):
            amp_graph.convert(model, wrong)  # type: ignore[call-overload]
    with pytest.raises(AmpGraphError, match="not Wrapper"):
        amp_graph.step_counts(made(given=False)[1])


def test_an_optimizer_whose_parameters_give_way_to_master_weights_skips_still() -> None:
    """As mixed-precision wrappers have it, which carry gradients there and weights back."""
    model = Mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    amp_graph.convert(model, optimizer, policy=scaled(2.0**10))
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer.param_groups[0]["params"] = masters
    for overflows in (False, True, False, True):
        model.zero_grad()
        model(X).square().mean().backward()
        if overflows:
            overflow(model)
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = p.grad
        before = [master.detach().clone() for master in masters]
        assert optimizer.step() is not overflows
        assert same([*masters], before) is overflows
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
    assert amp_graph.step_counts(optimizer) == StepCounts(2, 2)
    assert amp_graph.scale_of(model).get_scale() == 2.0**8
