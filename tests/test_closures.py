"""Steps that are given a closure: what it calls may be converted in the middle of a step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer

import amp_graph
from amp_graph import ConversionWarning

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "no_other_scales")


def same(ones: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, ones, others))


HUGE = 1e9  # of which a layer makes infinity in float16


class Mine(Optimizer):
    """An optimizer of somebody's own, which moves the weights before it calls the closure, too."""

    def __init__(self, params: Any):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for p in parameters:
            p.add_(0.01)
        with torch.enable_grad():
            loss = closure()
        for p in parameters:
            self.state[p]["seen"] = p.grad.clone()
            p.sub_(p.grad, alpha=0.1).sub_(0.01)
        return loss


MAKE = {
    "SGD": lambda p: SGD(p, lr=0.1),
    "AdamW": lambda p: AdamW(p, lr=0.01),
    "LBFGS": lambda p: LBFGS(p, lr=0.1, max_iter=3),
    "one's own": Mine,
}


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_first_step_of_a_script_that_knows_nothing_is_skipped_too(start, name, dtype):
    """Its model gets a loss scale in the first evaluation, which overflows."""
    start(DTYPE=dtype)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
    optimizer = MAKE[name](model.parameters())
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(4, 8)

    def evaluated(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(lambda: evaluated(x * (HUGE if dtype == "float16" else 1)))
    assert same([*before.values()], [*model.parameters()]) is (dtype == "float16")
    assert all(p.isfinite().all() for p in model.parameters())
    if dtype == "float16":
        assert amp_graph.step_counts(optimizer).skipped == 1 and not optimizer.state
        optimizer.step(lambda: evaluated(x))
        assert not same([*before.values()], [*model.parameters()])


class Uncopied(Tensor):
    """As tensors of 8 bits that take no operator but their own."""

    def __deepcopy__(self, memo: Any) -> Tensor:
        raise NotImplementedError("attempting to run unimplemented operator")


def test_a_state_that_cannot_be_copied_ends_no_training():
    model = nn.Linear(8, 3)
    optimizer = Mine(model.parameters())
    amp_graph.convert(model, optimizer, policy="float16")
    for p in model.parameters():
        optimizer.state[p]["eighth"] = torch.zeros(3).as_subclass(Uncopied)
    before = copy.deepcopy(model.state_dict())

    def closure() -> Tensor:
        loss: Tensor = model(torch.full((4, 8), HUGE)).square().mean()
        loss.backward()
        return loss

    with pytest.warns(ConversionWarning, match="the state of Mine cannot be copied"):
        optimizer.step(closure)
    assert same([*before.values()], [*model.parameters()])
