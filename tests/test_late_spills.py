"""What spilled into a plain model in front of a converted one is skipped when that is stepped."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint
from training import same, scaled

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "no_other_scales")

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
KINDS = {
    "SGD": lambda p: SGD(p, lr=1e-3),
    "fused": lambda p: Adam(p, lr=1e-3, fused=True),
    "foreach": lambda p: AdamW(p, lr=1e-3),
}


class Pair:
    """A plain encoder and a converted head, whose optimizers are `of_front` and `of_head`."""

    def __init__(self, kind: Any):
        torch.manual_seed(0)
        self.front = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6))
        self.head = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.of_front: Optimizer = kind(self.front.parameters())
        self.of_head = SGD(self.head.parameters(), lr=1e-3)
        amp_graph.convert(self.head, self.of_head, policy=scaled(2.0**8))
        self.backward()
        self.step_front()
        self.of_head.step()
        self.zero()

    def zero(self) -> None:
        self.of_front.zero_grad()
        self.of_head.zero_grad()

    def backward(self, times: float = 1.0, whole: bool = False) -> None:
        def run(x: Tensor) -> Tensor:
            return self.head(self.front(x))

        x = X.clone().requires_grad_(whole)
        result = checkpoint(run, x, use_reentrant=True) if whole else run(x)
        (result.float().square().mean() * times).backward()

    def step_front(self) -> bool:
        """Whether it stepped. All numbers stay finite."""
        before = copy.deepcopy([*self.front.parameters()])
        self.of_front.step()
        assert all(bool(p.isfinite().all()) for p in self.front.parameters())
        states = [v for s in self.of_front.state.values() for v in s.values()]
        assert all(bool(v.isfinite().all()) for v in states if isinstance(v, Tensor))
        return not same([*self.front.parameters()], before)

    def scale(self) -> float:
        scale = amp_graph.scale_of(self.head)
        assert scale is not None
        return scale.get_scale()


@pytest.mark.parametrize("name", KINDS)
def test_in_a_round_that_is_over(name: str) -> None:
    """The head is stepped for each micro-batch, what is in front of it for every second."""
    pair = Pair(KINDS[name])
    for times in (1e9, 1.0):
        pair.of_head.zero_grad()
        pair.backward(times)
        pair.of_head.step()
    assert not pair.step_front()
    pair.zero()
    scale = pair.scale()
    for _ in range(2):
        pair.backward()
        pair.of_head.step()
        assert pair.step_front()
        pair.zero()
    assert pair.scale() == scale


@pytest.mark.parametrize("name", KINDS)
def test_in_gradients_that_were_not_stepped_by_and_are_there_still(name: str) -> None:
    pair = Pair(KINDS[name])
    pair.backward(1e9)
    assert [pair.step_front(), pair.step_front()] == [False, False]
    pair.head(X.new_zeros(2, 6))
    assert not pair.step_front()
    pair.zero()
    pair.backward()
    assert [pair.step_front(), pair.step_front()] == [True, True]


@pytest.mark.parametrize("name", KINDS)
def test_out_of_what_a_checkpoint_runs_again(name: str) -> None:
    pair = Pair(KINDS[name])
    pair.backward(1e9, whole=True)
    assert not pair.step_front()
    pair.zero()
    pair.backward(whole=True)
    assert pair.step_front()


def test_out_of_a_checkpoint_it_lowers_the_scale_of_the_model_that_spilled() -> None:
    pair = Pair(KINDS["SGD"])
    scale = pair.scale()
    pair.backward(1e9, whole=True)
    assert not pair.step_front()
    pair.zero()
    pair.head(X.new_zeros(2, 6))
    assert pair.scale() == scale / 2


@pytest.mark.parametrize("name", ["SGD", "foreach"])
def test_an_infinity_of_its_own_is_stepped_by_as_in_float32(name: str) -> None:
    pair = Pair(KINDS[name])
    scale = pair.scale()
    pair.backward()
    pair.front[0].bias.grad.fill_(torch.inf)
    pair.of_front.step()
    assert not pair.front[0].bias.isfinite().any()
    pair.of_head.step()
    pair.head(X.new_zeros(2, 6))
    assert pair.scale() == scale


def test_before_another_model_of_the_same_optimizer_had_its_first_gradient() -> None:
    """It is still the one that spilled whose scale is lowered, and no other."""
    torch.manual_seed(0)
    spilling, *others = (nn.Linear(4, 4) for _ in range(3))
    optimizer = SGD([p for model in others for p in model.parameters()], lr=1e-3)
    amp_graph.convert(spilling, SGD(spilling.parameters(), lr=1e-3), policy=scaled(2.0**8))
    for model in others:
        amp_graph.convert(model, optimizer, policy=scaled(2.0**4))
    (spilling(others[0](X)).sum() * 1e3).backward()
    others[1](X).sum().backward()
    assert optimizer.step() is False
    scales = [amp_graph.scale_of(model).get_scale() for model in (spilling, *others)]
    assert scales == [2.0**7, 2.0**4, 2.0**4]


def test_gradients_that_came_in_no_backward_pass_are_not_what_was_spilled_before() -> None:
    """They are made by hand, and the scale of their model is to blame for them."""
    spilling, plain, model = (nn.Linear(4, 4) for _ in range(3))
    optimizer = SGD(model.parameters(), lr=1e-3)
    amp_graph.convert(spilling, SGD(spilling.parameters(), lr=1e-3), policy=scaled(2.0**8))
    amp_graph.convert(model, optimizer, policy=scaled(2.0**4))
    (spilling(plain(X)).sum() * 1e3).backward()
    model(X)
    model.bias.grad = torch.full((4,), torch.inf)
    assert optimizer.step() is False
    assert amp_graph.scale_of(model).get_scale() == 2.0**3


def test_an_overflow_that_nothing_spilled_is_stepped_by_as_ever() -> None:
    """In the first round, when nobody was shown anything."""
    front, head = nn.Linear(4, 6), nn.Linear(6, 1)
    amp_graph.convert(head, policy=scaled(2.0**8))
    head(front(X)).sum().backward()
    front.weight.grad = torch.full_like(front.weight, torch.inf)
    SGD(front.parameters(), lr=0.1).step()
    assert not front.weight.isfinite().any()
