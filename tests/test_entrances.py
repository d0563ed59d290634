"""What enters a graph for its parameters stands for the next call, wherever that changes nothing.

The reference is a graph that gets everything anew at each call.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from counting import PRODUCTS, DispatchCounter, in_backward
from entering_anew import POLICIES, Net, Use, assert_as_anew, by_policy, loss, made_in
from torch import Tensor, nn
from torch.optim import SGD
from training import X

import amp_graph
from amp_graph import Policy
from amp_graph.boundary import entrances, standing

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "no_other_scales")


@by_policy
def test_only_the_first_of_many_steps_makes_them(policy: Policy) -> None:
    model = amp_graph.convert(Net(), policy=policy)
    optimizer = SGD(model.parameters(), lr=0.1)

    def step() -> None:
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    standing.let_go_of_all()
    assert made_in(step) > 0
    assert [made_in(step) for _ in range(3)] == [0, 0, 0]


@by_policy
def test_groups_stand_from_the_first_call_on(policy: Policy, monkeypatch: Any) -> None:
    """One that is made does not let go of another's."""
    monkeypatch.setattr(entrances, "SMALL_BYTES", 1)
    monkeypatch.setattr(entrances, "GROUP_BYTES", 1)
    model = amp_graph.convert(Net(), policy=policy)
    assert [made_in(lambda: loss(model).backward()) for _ in range(3)][1:] == [0, 0]
    model.head.weight.requires_grad_(False)
    first, *others = [made_in(lambda: loss(model).backward()) for _ in range(3)]
    assert first > 0 and others == [0, 0]


def test_calls_whose_inputs_have_gradients_make_them_once() -> None:
    model = amp_graph.convert(Net(), policy=POLICIES["scaled"])

    def attack() -> None:
        x = X.clone().requires_grad_()
        torch.autograd.grad(loss(model, x), [x])

    loss(model).backward()
    first, *others = [made_in(attack) for _ in range(3)]
    assert max(others) < first


def a_call_that_comes_to_nothing(model: nn.Module) -> None:
    loss(model, 2 * X)
    loss(model).backward()


def a_graph_kept_for_later(model: nn.Module) -> None:
    first = loss(model)
    first.backward(retain_graph=True)
    loss(model, -X).backward()
    first.backward()


def second_derivatives(model: nn.Module) -> None:
    parameters = [*model.parameters()]
    slopes = torch.autograd.grad(loss(model), parameters, create_graph=True)
    (loss(model, -X) + sum(slope.square().sum() for slope in slopes)).backward()


def some_gradients_alone(model: nn.Module) -> None:
    first = next(model.parameters())
    loss(model).backward(inputs=[first])
    loss(model, -X).backward()


def frozen_and_back(model: nn.Module) -> None:
    for frozen in (True, False):
        next(model.parameters()).requires_grad_(not frozen)
        loss(model).backward()


def other_memory(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data * 0.5
    loss(model).backward()


def written_in_place(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(0.5)
    loss(model).backward()


def other_parameters(model: nn.Module) -> None:
    for module in model.children():
        for name, p in [*module.named_parameters(recurse=False)]:
            setattr(module, name, nn.Parameter(p.detach()))  # in the same memory
    loss(model).backward()


def with_hooks(model: nn.Module) -> None:
    handles = [p.register_hook(lambda g: 2 * g) for p in model.parameters()]
    loss(model).backward()
    for handle in handles:
        handle.remove()
    loss(model).backward()


def of_functional_calls(model: nn.Module) -> None:
    given = {name: (p * 0.5).detach().requires_grad_() for name, p in model.named_parameters()}
    torch.func.functional_call(model, given, (X,)).float().square().mean().backward()
    for p, its in zip(model.parameters(), given.values(), strict=True):
        p.grad = its.grad


USES = [
    *(a_call_that_comes_to_nothing, a_graph_kept_for_later, second_derivatives),
    *(some_gradients_alone, frozen_and_back, other_memory, written_in_place, other_parameters),
    *(with_hooks, of_functional_calls),
]


@by_policy
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_gradients_are_those_of_entering_anew(
    policy: Policy, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing, "CALLS", 4)
    assert_as_anew(policy, use)


@by_policy
def test_several_threads_get_their_own(policy: Policy) -> None:
    torch.manual_seed(0)
    model = amp_graph.convert(Net(), policy=policy)
    inputs = [X * k for k in range(1, 5)]
    parameters = [*model.parameters()]

    def of(x: Tensor) -> list[Tensor]:
        return [*torch.autograd.grad(loss(model, x), parameters)]

    expected = [of(x) for x in inputs]
    found: list[Any] = [None] * len(inputs)

    def work(k: int) -> None:
        for _ in range(20):
            found[k] = of(inputs[k])

    threads = [threading.Thread(target=work, args=[k]) for k in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@by_policy
def test_a_model_that_is_gone_leaves_nothing(policy: Policy) -> None:
    model = amp_graph.convert(Net(), policy=policy)
    loss(model).backward()
    loss(model).backward()
    gone = [weakref.ref(p) for p in model.parameters()]
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


def test_calls_without_a_backward_pass_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "CALLS", 4)
    standing.let_go_of_all()
    model = amp_graph.convert(Net(), policy=Policy("bfloat16"))
    for _ in range(12):
        loss(model)
        assert all(len(each._entered) <= 4 for each in standing._all)


class Both(nn.Module):
    """Reads a parameter in low precision and in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight).sum() + self.weight.exp().sum()


@by_policy
def test_a_gradient_that_is_differentiated_again_comes_from_all_uses(policy: Policy) -> None:
    plain = Both()
    model = amp_graph.convert(copy.deepcopy(plain), policy=policy)
    found, expected = (
        torch.autograd.grad(each(X), each.weight, create_graph=True)[0] for each in (model, plain)
    )
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


class Deep(nn.Module):
    """Layers of more than half a MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(400, 400) for _ in range(4)])
        self.head = nn.Linear(400, 400)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class BackwardProducts(DispatchCounter):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def record(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        self.count += name in PRODUCTS and in_backward()


@by_policy
def test_the_gradient_of_the_last_layer_does_not_take_those_of_all(policy: Policy) -> None:
    """By which VQGAN and others balance their losses. Of the layer before, in the same group, it
    takes that of the weight, and what leads there."""
    model = amp_graph.convert(Deep(), policy=policy)
    x = torch.randn(2, 400)

    def balance() -> int:
        with BackwardProducts() as products:
            torch.autograd.grad(loss(model, x), model.head.weight)
        return products.count

    assert [balance() for _ in range(2)] == [3, 3]


def stands() -> bool:
    """Whether anything does."""
    return any(each._entered or each._together is not None for each in standing._all)


def test_another_stream_lets_go_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """With streams that the CPU does not have."""
    model = amp_graph.convert(Net(), policy=Policy("bfloat16"))
    loss(model).backward()
    assert stands()
    streams = {"now": frozenset("a")}
    monkeypatch.setattr(standing, "current_streams", lambda devices: streams["now"])
    monkeypatch.setattr(standing, "_streams", {})
    device = torch.device("cpu")
    standing.follow_streams([device])
    assert not stands()
    loss(model).backward()
    standing.follow_streams([device])
    assert stands()
    streams["now"] = frozenset("b")
    standing.follow_streams([device])
    assert not stands()
