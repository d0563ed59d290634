"""Steps that are given a closure: what it calls may be converted in the middle of a step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

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


def test_nothing_is_copied_where_no_loss_scale_is(recwarn):
    model = nn.Linear(8, 3)
    optimizer = Mine(model.parameters())
    amp_graph.convert(model, optimizer, policy="bfloat16")
    for p in model.parameters():
        optimizer.state[p]["eighth"] = torch.zeros(3).as_subclass(Uncopied)

    def closure() -> Tensor:
        loss: Tensor = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert not [str(w.message) for w in recwarn if w.category is ConversionWarning]


def given(optimizer: Optimizer, model: nn.Module, scale: float = 2.0**8) -> None:
    policy = amp_graph.Policy("float16", loss_scale=amp_graph.LossScale(scale))
    amp_graph.convert(model, optimizer, policy=policy)


def test_lbfgs_after_a_step_that_was_over_at_once():
    """It had converged; of the next one the second evaluation overflows."""
    model = nn.Linear(4, 2)
    optimizer = LBFGS(model.parameters(), lr=0.1, max_iter=5)
    given(optimizer, model)
    x, weights = torch.randn(8, 4), iter([0.0, 1.0, 1e30, 1.0])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean() * next(weights)
        loss.backward()
        return loss

    optimizer.step(closure)
    before = copy.deepcopy([*model.parameters()])
    optimizer.step(closure)
    assert same([*model.parameters()], before)
    assert amp_graph.step_counts(optimizer) == amp_graph.StepCounts(stepped=1, skipped=1)


def test_what_was_put_around_a_step_before_runs_before_its_closure():
    losses = []
    for is_converted in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = SGD(model.parameters(), lr=0.1)
        step = optimizer.step

        def moving(closure: Any, model: nn.Module = model, step: Any = step) -> Any:
            with torch.no_grad():
                model.weight.add_(1.0)
            return step(closure)

        optimizer.step = moving  # type: ignore[method-assign]
        if is_converted:
            given(optimizer, model)

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(torch.ones(1, 2)).square().sum()
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure).detach()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_a_closure_may_add_a_group():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = Mine(model[0].parameters())
    given(optimizer, model)
    before = copy.deepcopy([*model.parameters()])

    def closure() -> Tensor:
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": [*model[1].parameters()]})
        model.zero_grad()
        loss: Tensor = model(torch.ones(2, 4)).sum() * 1e30
        loss.backward()
        return loss

    optimizer.step(closure)
    assert same([*model[0].parameters()], before[:2])
    assert len(optimizer.param_groups) == 2


def test_a_hook_behind_the_step_in_which_an_optimizer_is_found_sees_no_infinity():
    """It may take averages of weights, before the step is undone."""
    model, seen = nn.Linear(4, 2), []
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: seen.extend(p.clone() for p in model.parameters()))
    amp_graph.convert(model, policy="float16")

    def closure() -> Tensor:
        loss: Tensor = model(torch.ones(2, 4)).sum() * 1e30
        loss.backward()
        return loss

    optimizer.step(closure)
    assert amp_graph.step_counts(optimizer).skipped == 1
    assert len(seen) == 2 and all(bool(p.isfinite().all()) for p in seen)


def squares(model: nn.Module, optimizer: Optimizer) -> Callable[[], Tensor]:
    """A closure of a model that is not converted."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        return loss

    return closure


def test_a_closure_of_a_plain_model_beside_a_converted_one_counts_for_nothing(recwarn):
    """None of its evaluations is under a scale, so that nothing needs to be copied."""
    other = amp_graph.convert(nn.Linear(8, 3), policy="float16")
    other(torch.ones(4, 8)).sum().backward()
    model = nn.Linear(8, 3)
    optimizer = LBFGS(model.parameters(), max_iter=2)
    optimizer.state[model.bias]["eighth"] = torch.zeros(3).as_subclass(Uncopied)

    for _ in range(3):
        optimizer.step(squares(model, optimizer))
    assert amp_graph.step_counts(optimizer) == amp_graph.StepCounts(0, 0)
    assert not [str(w.message) for w in recwarn if w.category is ConversionWarning]


def test_a_scheduler_around_a_step_moves_no_weights(recwarn):
    """So that the closure can be called before the step, of which nothing is copied."""
    model = nn.Linear(8, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    StepLR(optimizer, 1)
    given(optimizer, model)
    optimizer.state[model.bias]["eighth"] = torch.zeros(3).as_subclass(Uncopied)

    optimizer.step(squares(model, optimizer))
    assert amp_graph.step_counts(optimizer).stepped == 1
    assert not [str(w.message) for w in recwarn if w.category is ConversionWarning]
