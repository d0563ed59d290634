"""Several calls before one backward pass: their gradients meet in float32, in few operators.

The reference is a graph that gets everything anew at each call.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from counting import in_backward
from entering_anew import (
    Aliases,
    Net,
    Use,
    always_anew,
    assert_as_anew,
    by_policy,
    gradients,
    loss,
    made_in,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import X

import amp_graph
from amp_graph import Policy
from amp_graph.boundary import standing

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "no_other_scales")


@by_policy
def test_calls_before_one_backward_pass_make_them_once(policy: Policy) -> None:
    model = amp_graph.convert(Net(), policy=policy)

    def step() -> None:
        sum(loss(model, k * X) for k in range(5)).backward()
        model.zero_grad()

    loss(model).backward()
    assert made_in(step) > 0
    assert [made_in(step) for _ in range(3)] == [0, 0, 0]


class Sums(Aliases):
    """Counts what casts gradients, or adds them up, in a backward pass."""

    def record(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        casts_or_adds = ("add", "add_", "copy_", "_foreach_copy_", "_foreach_add_", "_to_copy")
        self.count += name in casts_or_adds and in_backward()


@by_policy
def test_one_call_more_costs_the_same_however_many_parameters(policy: Policy) -> None:
    def of_a_call(layers: int) -> int:
        chain = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
        model = amp_graph.convert(chain, policy=policy)
        found = []
        for calls in (2, 3):
            total = sum(loss(model, k * X) for k in range(calls))
            with Sums() as counter:
                total.backward()
            found.append(counter.count)
            model.zero_grad()
        return found[1] - found[0]

    assert of_a_call(layers=2) == of_a_call(layers=6)


def two_calls_before_backward(model: nn.Module) -> None:
    (loss(model) + loss(model, -X) * 3).backward()


def many_calls_before_backward(model: nn.Module) -> None:
    sum(loss(model, k * X) for k in range(1, 2 * standing.CALLS + 2)).backward()


def the_second_of_two_calls_alone(model: nn.Module) -> None:
    _, second = loss(model), loss(model, -X)
    second.backward()


def two_calls_one_by_one(model: nn.Module) -> None:
    for each in [loss(model), loss(model, -X), loss(model, 3 * X)]:
        each.backward()


def two_calls_kept_for_later(model: nn.Module) -> None:
    both = loss(model) + loss(model, -X)
    both.backward(retain_graph=True)
    (loss(model, 2 * X) + loss(model, 3 * X)).backward()
    both.backward()


def a_result_fed_back(model: nn.Module) -> None:
    loss(model, model(X)).backward()


def inside_of_a_checkpoint(model: nn.Module) -> None:
    for reentrant in (True, False):
        x = X.clone().requires_grad_()
        halves = checkpoint(lambda x: model(model(x)), x, use_reentrant=reentrant)
        (halves.square().mean() + loss(model, -X)).backward()


def one_gradient_of_two_calls(model: nn.Module) -> None:
    *_, last = model.parameters()
    (slope,) = torch.autograd.grad(loss(model) + loss(model, -X), [last])
    (slope.sum() * loss(model)).backward()


def second_derivatives_of_two_calls(model: nn.Module) -> None:
    both = loss(model) + loss(model, -X)
    slopes = torch.autograd.grad(both, [*model.parameters()], create_graph=True)
    (both + sum(slope.square().sum() for slope in slopes)).backward()


def written_before_two_calls(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    (loss(model) + loss(model, -X)).backward()


USES = [
    *(two_calls_before_backward, the_second_of_two_calls_alone, two_calls_one_by_one),
    *(one_gradient_of_two_calls, written_before_two_calls),
]
ROUNDED = [  # float32 sums of more than two, in another order
    *(many_calls_before_backward, two_calls_kept_for_later, a_result_fed_back),
    *(inside_of_a_checkpoint, second_derivatives_of_two_calls),
]


@by_policy
@pytest.mark.parametrize("use", [*USES, *ROUNDED], ids=lambda use: use.__name__)
def test_gradients_are_those_of_entering_anew(
    policy: Policy, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing, "CALLS", 4)
    assert_as_anew(policy, use, tolerance=1e-6 if use in ROUNDED else 0.0)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(4, 8), nn.ModuleList([Net(), Net()])

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.body(x).relu()[:, :4]
        return [head(x) for head in self.heads]


@by_policy
@pytest.mark.parametrize("used", [[(0,), (0, 1)], [(0, 1), (0,)], [(0,), (1,)], [(0,), (0,)]])
def test_what_has_no_gradient_in_one_of_two_calls_gets_that_of_the_other(
    policy: Policy, used: list[tuple[int, ...]]
) -> None:
    torch.manual_seed(0)
    net = TwoHeads()
    found = []
    for around in (always_anew, nullcontext):
        model = amp_graph.convert(copy.deepcopy(net), policy=policy)
        with around():
            results = [model(k * X) for k in (1, 2)]
            chosen = [given[i] for given, its in zip(results, used, strict=True) for i in its]
            sum(result.square().mean() for result in chosen).backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(*found, rtol=0, atol=0)
    has_none = [name for name, gradient in found[1].items() if gradient is None]
    assert bool(has_none) == (used == [(0,), (0,)])


def test_gradients_of_two_calls_meet_in_float32() -> None:
    torch.manual_seed(0)
    model = amp_graph.convert(Net(), policy=Policy("bfloat16"))
    loss(model).backward()
    model.zero_grad()
    (loss(model) + loss(model, -X)).backward()
    together = gradients(model)
    model.zero_grad()
    loss(model).backward()
    loss(model, -X).backward()
    torch.testing.assert_close(together, gradients(model), rtol=0, atol=0)
