"""Steps in an order, of optimizers and in states, that training loops seldom bring about."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_value_
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from training import Mlp, X, overflow, same, scaled

import amp_graph
from amp_graph import StepCounts

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "no_other_scales")


def backward(model: nn.Module, times: float = 1.0) -> None:
    (model(X).square().mean() * times).backward()


def test_two_forwards_and_then_two_steps() -> None:
    """The second backward pass comes after the step that ends the round of both, and overflows;
    clipped by value its gradients are finite."""
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    amp_graph.convert(model, optimizer, policy=scaled(2.0**10))
    losses = [model(X.abs()).sum() * times for times in (1.0, 1e9)]
    stepped = []
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        clip_grad_value_(model.parameters(), 1.0)
        before = copy.deepcopy([*model.parameters()])
        stepped.append(optimizer.step())
        assert same([*model.parameters()], before) is not stepped[-1]
    assert stepped == [True, False]


@pytest.mark.parametrize("kind", [Adam, AdamW, SGD, Adagrad])
@pytest.mark.parametrize("how", ["loaded", "of two kinds"])
def test_a_fused_optimizer_with_groups_that_are_not(kind: Any, how: str) -> None:
    """They take no `found_inf`."""
    model = Mlp()
    layers = model.first, model.second
    others = {"fused": False, "foreach": False} if how == "of two kinds" else {}
    groups: Any = [{"params": [*layer.parameters()]} for layer in layers]
    optimizer = kind([groups[0] | others, groups[1]], lr=0.1, fused=True)
    if how == "loaded":
        other = kind(groups, lr=0.1)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        other.step()
        optimizer.load_state_dict(other.state_dict())
    amp_graph.convert(model, optimizer, policy=scaled(2.0**8))
    for overflows in (False, True, False):
        optimizer.zero_grad()
        backward(model)
        if overflows:
            overflow(model)
        before = copy.deepcopy([*model.parameters()])
        optimizer.step()
        assert same([*model.parameters()], before) is overflows
    assert amp_graph.step_counts(optimizer) == StepCounts(stepped=2, skipped=1)


def test_momentum_where_the_state_was_looked_at_before_a_skipped_first_step() -> None:
    """To look makes an empty one. Memory that momentum might get holds NaN."""
    model = nn.Linear(64, 64, bias=False)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    amp_graph.convert(model, optimizer, policy="float16")
    assert optimizer.state[model.weight] == {}
    (model(torch.ones(2, 64)).sum() * 1e9).backward()
    rubbish = [torch.full((64, 64), float("nan")) for _ in range(50)]
    del rubbish
    optimizer.step()
    assert not optimizer.state[model.weight]["momentum_buffer"].any()


def test_a_step_that_raises_does_not_count() -> None:
    class Failing(SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise KeyboardInterrupt
            return super().step(closure)

    model = Mlp()
    optimizer = Failing(model.parameters(), lr=0.1)
    amp_graph.convert(model, optimizer, policy=scaled(2.0**8))
    backward(model)
    optimizer.fails = True
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    optimizer.fails = False
    assert amp_graph.step_counts(optimizer) == StepCounts(stepped=0, skipped=0)
    optimizer.step()
    assert amp_graph.step_counts(optimizer) == StepCounts(stepped=1, skipped=0)


def test_gradients_come_back_after_a_step_that_raised_on_zeros() -> None:
    """In the step in which an optimizer is found, what overflowed is replaced by zeros."""
    model = Mlp()
    optimizer = SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    amp_graph.convert(model, policy=scaled(2.0**8))

    def raising(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = optimizer.register_step_pre_hook(raising)
    backward(model)
    overflow(model)
    before = copy.deepcopy([*model.parameters()])
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    hook.remove()
    optimizer.step()
    assert same([*model.parameters()], before)


def test_an_optimizer_that_takes_gradients_to_be_there_skips_its_first_step() -> None:
    class ByHand(Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p -= 0.1 * p.grad

    model = amp_graph.convert(Mlp(), policy=scaled(2.0**8))
    optimizer = ByHand(model.parameters(), {})  # which nobody knows until it steps
    backward(model)
    overflow(model)
    before = copy.deepcopy([*model.parameters()])
    optimizer.step()
    assert same([*model.parameters()], before)


def test_steps_inside_of_a_backward_pass_count_what_is_there_by_then() -> None:
    """The second layer is stepped before the gradients of the first are made, which overflow."""
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    nn.init.constant_(second.weight, 1e3)
    model = nn.Sequential(first, second)
    optimizers = {layer.weight: AdamW(layer.parameters(), fused=True) for layer in (first, second)}
    amp_graph.convert(model, [*optimizers.values()], policy=scaled(2.0**10))

    def step(weight: torch.Tensor) -> None:
        optimizers[weight].step()

    for weight in optimizers:
        weight.register_post_accumulate_grad_hook(step)
    model(torch.ones(1, 4)).sum().backward()
    counts = [amp_graph.step_counts(optimizer) for optimizer in optimizers.values()]
    assert counts == [StepCounts(0, 1), StepCounts(1, 0)]


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))

    def forward(self, x: torch.Tensor, i: int) -> torch.Tensor:
        return self.heads[i](x)


@pytest.mark.parametrize("overflowing", [0, 1])
def test_an_overflow_in_one_pass_beside_gradients_of_another_that_were_written_to(
    overflowing: int,
) -> None:
    """These are looked at anew, while the overflow is known."""
    model = Heads()
    optimizer = SGD(model.parameters(), lr=0.1)
    amp_graph.convert(model, optimizer, policy=scaled(2.0**8))
    for i in range(2):
        (model(X, i).sum() * (1e9 if i == overflowing else 1.0)).backward()
    for p in model.heads[1 - overflowing].parameters():
        p.grad.mul_(0.5)
    assert optimizer.step() is False


@pytest.mark.parametrize("value", [1.0, torch.inf])
def test_gradients_that_were_made_in_inference_mode(value: float) -> None:
    """They have no versions to be known by."""
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    amp_graph.convert(model, optimizer, policy=scaled(2.0**8))
    backward(model)
    with torch.inference_mode():
        model.bias.grad = torch.full((2,), value)
    before = model.bias.detach().clone()
    assert optimizer.step() is (value == 1.0)
    assert torch.equal(model.bias, before - 0.1 if value == 1.0 else before)


def test_a_backward_pass_in_inference_mode() -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    amp_graph.convert(model, optimizer, policy=scaled(2.0**8))
    for times in (1.0, torch.inf):
        loss = model(X).sum() * times
        with torch.inference_mode():
            loss.backward()
        assert optimizer.step() is (times == 1.0)
        optimizer.zero_grad()


def test_a_step_that_outlived_its_optimizer() -> None:
    model = Mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    amp_graph.convert(model, optimizer, policy="float16")
    step = optimizer.step
    del optimizer
    with pytest.raises(ReferenceError, match="keep it"):
        step()


def test_an_optimizer_whose_first_parameter_has_no_data() -> None:
    model = Mlp()
    amp_graph.convert(model, policy="float16")
    backward(model)
    absent = nn.Parameter(torch.empty(3, device="meta"))
    optimizer = SGD([absent, *model.parameters()], lr=0.1)
    before = copy.deepcopy([*model.parameters()])
    optimizer.step()
    stepped = copy.deepcopy([*model.parameters()])
    assert not same(stepped, before)
    optimizer.zero_grad()
    optimizer.step()
    assert same([*model.parameters()], stepped)


def found_inf_of(optimizer: Optimizer) -> list[Any]:
    """What its steps are given, as they begin."""
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(getattr(o, "found_inf", None)))
    return seen


def test_a_grad_scaler_steps_a_plain_generator_before_a_converted_discriminator() -> None:
    """What is spilled into it is the scaler's affair, which hands a fused optimizer its own flag;
    the discriminator's scale goes down."""
    torch.manual_seed(0)
    G, D = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    of_g, of_d = Adam(G.parameters(), fused=True), Adam(D.parameters())
    amp_graph.convert(D, of_d, policy="float16")
    seen = found_inf_of(of_g)
    D(G(X).detach()).mean().backward()
    of_d.step()
    scale = amp_graph.scale_of(D)
    assert scale is not None
    before = scale.get_scale()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    flags = []
    for times in (1e-6, 1e3):
        of_g.zero_grad()
        scaler.scale(D(G(X)).mean() * times).backward()
        weights = copy.deepcopy([*G.parameters()])
        scaler.step(of_g)
        flags.append(bool(seen[-1]))
        assert same([*G.parameters()], weights) is flags[-1]
        scaler.update()
    assert flags == [False, True]
    D(G(X))
    assert scale.get_scale() < before


def test_a_step_says_that_it_is_taken_after_one_of_a_model_that_is_converted_no_more() -> None:
    one, other = Mlp(), Mlp()
    optimizer = SGD([*one.parameters(), *other.parameters()], lr=0.1)
    amp_graph.convert(one, optimizer, policy=scaled(2.0**8))
    amp_graph.convert(other, optimizer, policy="bfloat16")
    backward(one)
    overflow(one)
    assert optimizer.step() is False
    amp_graph.restore(one)
    optimizer.zero_grad()
    backward(other)
    assert optimizer.step() is True
