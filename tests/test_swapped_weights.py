"""Weights swapped through `.data` while a backward pass is still to come, and parameters whose
memory parts: each pass has the weights it would have without copies in low precision.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from counting import DispatchCounter
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from training import FLOAT16, Mlp, X, assert_same_gradients, distance, scaled, twins

import amp_graph
from amp_graph import Policy
from amp_graph.weights import store

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

POLICIES = {
    "float16": scaled(2.0**8),
    "bfloat16": Policy("bfloat16"),
    "without a scale": Policy("float16", loss_scale=None),
}
WITHIN = {"float16": FLOAT16, "bfloat16": 8 * FLOAT16, "without a scale": FLOAT16}


class Broken(Mlp):
    """In two graphs, of which the second has the first one's weight as well."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.second(hidden + nn.functional.linear(x, self.first.weight))


def copied(model: nn.Module, values: Sequence[Tensor]) -> None:
    for p, value in zip(model.parameters(), values, strict=True):
        p.data.copy_(value)


def put(model: nn.Module, values: Sequence[Tensor]) -> None:
    for p, value in zip(model.parameters(), values, strict=True):
        p.data = value


def as_they_are(model: nn.Module, swap: Any) -> list[Tensor]:
    return [p.data.clone() if swap is copied else p.data for p in model.parameters()]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("swap", [copied, put])
@pytest.mark.parametrize("kind", [Mlp, Broken])
@pytest.mark.parametrize("called_before", [True, False])
def test_a_teacher_s_call_between_forward_and_backward(name, swap, kind, called_before) -> None:
    plain = kind()
    model = amp_graph.convert(copy.deepcopy(plain), policy=POLICIES[name])
    results = []
    for each in (plain, model):
        if called_before:
            with torch.no_grad():
                each(X)
            each(X).sum().backward()
            each.zero_grad()
        student = each(X)
        backup = as_they_are(each, swap)
        swap(each, [torch.full_like(p, 0.3) for p in each.parameters()])
        with torch.no_grad():
            teacher = each(X)
        swap(each, backup)
        (student - teacher).square().mean().backward()
        results.append(teacher)
    assert_same_gradients(model, plain, WITHIN[name])
    assert distance(results[1], results[0]) <= WITHIN[name]


@pytest.mark.parametrize("name", POLICIES)
def test_two_forwards_with_other_weights_before_one_backward(name: str) -> None:
    plain = Mlp()
    model = amp_graph.convert(copy.deepcopy(plain), policy=POLICIES[name])
    for each in (plain, model):
        first = each(X).square().mean()
        put(each, [p.data * 0.5 for p in each.parameters()])
        second = each(X + 1).square().mean()
        put(each, [p.data + 0.1 for p in each.parameters()])
        (first + second + each(X - 1).square().mean()).backward()
    assert_same_gradients(model, plain, WITHIN[name])


def test_a_second_backward_pass_through_a_graph_that_was_kept() -> None:
    plain = Mlp()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for each in (plain, model):
        student = each(X)
        student.sum().backward(retain_graph=True)
        backup = as_they_are(each, copied)
        copied(each, [torch.zeros_like(p) for p in each.parameters()])
        with torch.no_grad():
            each(X)
        copied(each, backup)
        student.square().mean().backward()
    assert_same_gradients(model, plain, WITHIN["bfloat16"])


class Casts(DispatchCounter):
    """How often weights were written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def record(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        self.written += name == "_foreach_copy_" and args[0][0].dtype is torch.bfloat16


def test_a_frozen_layer_that_is_gone_before_the_backward_pass() -> None:
    plain, model = twins(Mlp(), "bfloat16")
    found = []
    for each in (plain, model):
        each.first.requires_grad_(False)
        x = X.clone().requires_grad_()
        loss = each(x).square().mean()
        with torch.no_grad():
            each(X)
        each.first = nn.Linear(4, 8)
        loss.backward()
        found.append(x.grad)
    assert distance(found[1], found[0]) <= WITHIN["bfloat16"]


def test_weights_are_written_again_only_where_they_were_overwritten() -> None:
    model = amp_graph.convert(Mlp(), policy="bfloat16")

    def step(calls: int, others: int) -> int:
        losses = [model(X).sum() for _ in range(calls)]
        with torch.no_grad():
            for _ in range(others):
                model(X)
        sum(losses).backward()
        model.zero_grad()
        return calls + others

    for calls, others, again in [(1, 0, 0), (2, 0, 0), (1, 1, 1), (1, 3, 1), (2, 1, 2), (1, 0, 0)]:
        step(calls, others)
        with Casts() as casts:
            asked = step(calls, others)
        assert casts.written == asked + again, (calls, others)


def test_a_step_hands_out_no_handle_of_a_hook() -> None:
    """Of which Dynamo's guards would have to find out whether it is for a module's."""
    model = amp_graph.convert(Mlp(), policy="bfloat16")
    model(X).sum().backward()
    before = RemovableHandle.next_id
    model(X).sum().backward()
    assert RemovableHandle.next_id == before


def test_parameters_that_get_other_memory_in_each_step_keep_their_copies(monkeypatch) -> None:
    """As optimizers that are written by hand give it to them: no backward pass waits by then."""
    made: list[Any] = []
    make = store.LowPrecisionWeight
    monkeypatch.setattr(store, "LowPrecisionWeight", lambda *args: made.append(args) or make(*args))
    model = amp_graph.convert(Mlp(), policy="bfloat16")
    for _ in range(4):
        loss = model(X).square().mean()
        model.zero_grad()
        loss.backward()
        put(model, [p.data - 0.1 * p.grad for p in model.parameters()])
    assert len(made) == 4


class Two(nn.Module):
    """Two layers; parameters of the second begin as those of the first, in one memory."""

    def __init__(self, share: Callable[[Tensor, Tensor], None]):
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)
        share(self.first.weight, self.second.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


def whole(one: Tensor, other: Tensor) -> None:
    other.data = one.data


def in_part(one: Tensor, other: Tensor) -> None:
    memory = torch.randn(6, 8)
    one.data, other.data = memory[:4], memory[2:]


def side_by_side(one: Tensor, other: Tensor) -> None:
    memory = torch.randn(8, 8)
    one.data, other.data = memory[:4], memory[4:]


def double_and_back(model: nn.Module) -> None:
    """Each parameter gets memory of its own."""
    model.double().float()
    model.second.weight.data.mul_(0.5)


def other_memory(model: nn.Module) -> None:
    model.second.weight.data = model.second.weight.data * 0.5 + 1


@pytest.mark.parametrize("refresh", ["always", "on_change"])
@pytest.mark.parametrize("share", [whole, in_part, side_by_side])
@pytest.mark.parametrize("part", [other_memory, double_and_back])
def test_parameters_that_shared_their_memory(refresh: str, share: Any, part: Any) -> None:
    policy = Policy("bfloat16", refresh_weights=refresh)
    model = amp_graph.convert(Two(share), policy=policy)
    x = torch.randn(2, 8)
    model(x)
    part(model)
    twin = amp_graph.convert(amp_graph.restore(copy.deepcopy(model)), policy=policy)
    assert all(map(torch.equal, model(x), twin(x)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_target_that_begins_as_the_network_itself(dtype: str) -> None:
    """BYOL: the target's parameters follow the network's, whose memory they had."""

    class Byol(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.target = Mlp(), Mlp().requires_grad_(False)
            for p, q in zip(self.online.parameters(), self.target.parameters(), strict=True):
                q.data = p.data

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.target(x + 1)
            return nn.functional.mse_loss(self.online(x), target)

    losses = []
    for is_converted in (False, True):
        torch.manual_seed(0)
        model = Byol()
        if is_converted:
            amp_graph.convert(model, policy=dtype)
        optimizer = torch.optim.SGD(model.online.parameters(), lr=0.5)
        for _ in range(20):
            loss = model(X)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            pairs = zip(model.online.parameters(), model.target.parameters(), strict=True)
            for p, q in pairs:
                q.data = 0.99 * q.data + 0.01 * p.data
        losses.append(loss.detach())
    assert distance(losses[1], losses[0]) <= 0.1
