"""Optimizers that are told on the device whether to step: by `found_inf`, as by a GradScaler."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from training import Mlp, X, overflow, same, scaled

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "no_other_scales")


def backward(model: nn.Module) -> None:
    model(X).square().mean().backward()


def test_momentum_beside_a_parameter_that_has_no_gradient() -> None:
    """It takes no step, so that it gets none."""
    model, unused = Mlp(), nn.Parameter(torch.ones(3))
    optimizer = SGD([unused, *model.parameters()], lr=0.1, momentum=0.9, fused=True)
    amp_graph.convert(model, optimizer, policy=scaled(2.0**8))
    for overflows in (True, False):
        backward(model)
        if overflows:
            overflow(model)
        told = optimizer.step()
        assert isinstance(told, torch.Tensor) and bool(told) is not overflows
        optimizer.zero_grad()
    assert unused not in optimizer.state


@pytest.mark.parametrize("dampened", [0, 1])
def test_momentum_that_is_dampened_in_one_of_two_groups(dampened: int) -> None:
    """Not so in a first step, which one that is skipped is not."""
    model = Mlp()
    groups = [{"params": part.parameters(), "dampening": 0.0} for part in model.children()]
    groups[dampened]["dampening"] = 0.5
    optimizer = SGD(groups, lr=0.1, momentum=0.9, fused=True)
    amp_graph.convert(model, optimizer, policy=scaled(2.0**8))
    backward(model)
    overflow(model)
    assert not optimizer.step()
    optimizer.zero_grad()
    backward(model)
    assert optimizer.step()
    assert all(
        torch.equal(optimizer.state[p]["momentum_buffer"], p.grad) for p in model.parameters()
    )


class Flagged(Optimizer):
    """Takes `found_inf` as packages do whose kernels are their own: with no option `fused`."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Any, momentum: float = 0.0):
        super().__init__(params, {"momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        found = getattr(self, "found_inf", torch.zeros(()))
        for p in [p for group in self.param_groups for p in group["params"]]:
            p.sub_(torch.where(found > 0, 0.0, 0.1 * p.grad))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_optimizer_of_others_that_takes_found_inf(momentum: float) -> None:
    """The host does not wait, unless there is momentum, of which nothing is known."""
    model = Mlp()
    optimizer = Flagged(model.parameters(), momentum)
    amp_graph.convert(model, optimizer, policy=scaled(2.0**8))
    for overflows in (False, True, False):
        optimizer.zero_grad()
        backward(model)
        if overflows:
            overflow(model)
        before = copy.deepcopy([*model.parameters()])
        told = optimizer.step()
        assert isinstance(told, bool if momentum else torch.Tensor)
        assert same([*model.parameters()], before) is overflows is not bool(told)


def test_a_fused_step_that_raised_leaves_no_flag_behind() -> None:
    """By which it would skip for ever once nobody sets it anew."""
    model = Mlp()
    optimizer = Adam(model.parameters(), fused=True)
    amp_graph.convert(model, optimizer, policy=scaled(2.0**8))

    def raising(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = optimizer.register_step_pre_hook(raising)
    backward(model)
    overflow(model)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    hook.remove()
    amp_graph.restore(model)
    optimizer.zero_grad()
    backward(model)
    before = copy.deepcopy([*model.parameters()])
    optimizer.step()
    assert not same([*model.parameters()], before)
