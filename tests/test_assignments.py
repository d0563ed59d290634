"""Tensors put into other memory inside of a model: `x.data = y`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import assert_same_gradients, distance, twins
from two_layers import BFLOAT16, POLICIES, Two, X

import amp_graph
from amp_graph import Policy

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
IGNORING_AUTOCAST = pytest.mark.filterwarnings("ignore:graph 0 of .* runs under autocast")
IS_OPERATOR = torch.__version__ >= "2.14"  # an assignment, for Dynamo


class Pair(Two):
    """A trained layer, one that follows it, and a queue of results."""

    def __init__(self) -> None:
        super().__init__()
        self.b.requires_grad_(False)
        self.queue: Tensor
        self.register_buffer("queue", torch.randn(8, 8))


class Follows(Pair):
    """As MoCo and BYOL have it."""

    @torch.no_grad()
    def follow(self) -> None:
        for p, q in zip(self.a.parameters(), self.b.parameters(), strict=True):
            q.data = q.data * 0.9 + p.data * 0.1

    def forward(self, x: Tensor) -> Tensor:
        self.follow()
        with torch.no_grad():
            key = self.b(x)
        return self.a(x) * key


class FollowsTwice(Follows):
    """Reads before, between and after, and writes into the new memory."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(x)
        for _ in range(2):
            self.follow()
            y = y + self.b(x)
        self.b.weight.data.mul_(1.5)
        return self.a(x) * (y + self.b(x))


class FollowsRecorded(Pair):
    """What is assigned has a history, which the weight has not."""

    def forward(self, x: Tensor) -> Tensor:
        self.b.weight.data = self.b.weight * 0.9 + self.a.weight * 0.1
        return self.a(x) * self.b(x)


class Queues(Pair):
    """Its own low-precision results are put into a float32 buffer."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        before = y @ self.queue.t()
        self.queue.data = torch.cat([self.queue.data[4:], y])
        return before + self.b(x) @ self.queue.t()


class KeepsTheOld(Pair):
    def forward(self, x: Tensor) -> Tensor:
        old = self.queue.data
        self.queue.data = self.queue.data * 0.5
        return self.a(x) @ self.queue + self.b(x) @ old


class Returns(Pair):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.queue.data = self.queue.data * 0.5
        return self.a(x), self.queue


class Borrows(Two):
    """Reads a weight normalised, and then as it was."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.a.weight.data
        self.a.weight.data = nn.functional.normalize(weight)
        y = self.b(self.a(x))
        self.a.weight.data = weight
        return y + self.a(x)


class Shares(Pair):
    """Two weights in one memory."""

    def forward(self, x: Tensor) -> Tensor:
        self.b.weight.data = self.a.weight.data
        y = self.b(x)
        self.b.weight.data.mul_(1.5)
        return self.a(x) * y


class Grows(Pair):
    def forward(self, x: Tensor) -> Tensor:
        before = self.queue.sum(0)
        self.queue.data = torch.cat([self.queue.data, self.a(x).detach()])
        return self.a(x) * before + self.b(x) * self.queue.sum(0)


class Transposes(Pair):
    def forward(self, x: Tensor) -> Tensor:
        before = self.b(x)
        self.b.weight.data = self.b.weight.data.t()
        return self.a(x) * self.b(x) + before


MOVED = [Follows, FollowsTwice, FollowsRecorded, Queues, KeepsTheOld, Returns]
LEFT = [Borrows, Shares, Grows, Transposes]
STEPS = 3


def results(output: Any) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def assert_alike(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert distance(one, other) <= BFLOAT16


def assert_trains_alike(model: nn.Module, plain: nn.Module) -> None:
    for _ in range(STEPS):
        outputs = []
        for each in (model, plain):
            each.zero_grad()
            outputs.append(results(each(X)))
            outputs[-1][0].square().mean().backward()
        assert_alike(*outputs)
        assert_same_gradients(model, plain, BFLOAT16)
        assert_alike(model.state_dict().values(), plain.state_dict().values())


@pytest.mark.parametrize("kind", MOVED)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_they_stay_in_the_graph(kind: type[nn.Module], policy: Policy) -> None:
    plain, model = twins(kind(), policy)
    assert_trains_alike(model, plain)
    (plan,) = amp_graph.plans(model)
    assert plan.fallback is None and plan.converts


def test_an_average_is_computed_in_float32() -> None:
    plain, model = twins(FollowsTwice(), "bfloat16")
    for _ in range(STEPS):
        model(X), plain(X)
    assert all(map(torch.equal, model.b.parameters(), plain.b.parameters()))


@pytest.mark.parametrize("kind", LEFT)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.filterwarnings("ignore:graph . of .* runs under autocast")
def test_what_cannot_is_left_to_autocast(kind: type[nn.Module], policy: Policy) -> None:
    """Memory that others have, another shape, or a parameter that is trained; where it is an
    operator, the first alone."""
    plain, model = twins(kind(), policy)
    assert_trains_alike(model, plain)
    is_left = kind is Shares or not IS_OPERATOR
    assert all(plan.autocast == is_left for plan in amp_graph.plans(model))


def test_the_memory_there_was_is_left_alone() -> None:
    _, model = twins(Follows(), "bfloat16")
    held = model.b.weight.detach()
    before = held.clone()
    model(X)
    assert torch.equal(held, before)
    assert not torch.equal(model.b.weight, before)


def test_what_is_returned_is_the_buffer() -> None:
    _, model = twins(Returns(), "bfloat16")
    for _ in range(STEPS):
        assert model(X)[1].data_ptr() == model.queue.data_ptr()


@pytest.mark.filterwarnings("ignore:graph 0 of .* is not compiled")
def test_they_are_compiled_where_they_are_operators() -> None:
    """Else AOTAutograd would make the assignment once, when it traces."""
    plain, model = twins(Follows(), Policy("bfloat16", compiler="inductor"))
    assert_trains_alike(model, plain)
    (plan,) = amp_graph.plans(model)
    assert (plan.uncompiled is None) == IS_OPERATOR


@pytest.mark.parametrize("kind", MOVED)
def test_tools_put_the_values_back(kind: type[nn.Module]) -> None:
    model = kind()
    before = copy.deepcopy(model.state_dict())
    report = amp_graph.compare(model, X, policy="bfloat16")
    assert 0 < report.outputs < BFLOAT16
    amp_graph.calibrate(model, [X], bound=0.5, policy="bfloat16")
    assert amp_graph.find_nonfinite(model, X, policy="bfloat16") is None
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def same(weight: Tensor) -> Tensor:
    return weight


def conditionally_moved(weight: Tensor) -> Tensor:
    return weight if weight.device == X.device else weight.to(X.device)


def moved(weight: Tensor) -> Tensor:
    return weight.to(X.device).float().contiguous()


@pytest.mark.parametrize("function", [same, conditionally_moved, moved])
def test_a_tensor_put_where_it_is_costs_no_graph(function: Callable[[Tensor], Tensor]) -> None:
    """As the losses of pytorch-metric-learning do with their weights."""

    class Assigns(Two):
        def forward(self, x: Tensor) -> Tensor:
            self.a.weight.data = function(self.a.weight.data)
            hidden = self.a(x)
            self.a.weight.data = function(self.a.weight.data)
            return self.b(hidden) + self.a(x)

    plain, model = twins(Assigns(), "bfloat16")
    assert_trains_alike(model, plain)
    (plan,) = amp_graph.plans(model)
    assert plan.fallback is None and plan.converts


TOLD = {
    "to a type": lambda layer, x: layer.to(x.dtype),
    "to a device": lambda layer, x: layer.to(x.device),
    "to a device by name": lambda layer, x: layer.to("cpu"),
    "to the CPU": lambda layer, x: layer.cpu(),
    "to what a tensor is": lambda layer, x: layer.to(x),
    "twice": lambda layer, x: layer.float().to(x.device),
}


@pytest.mark.parametrize("tell", TOLD.values(), ids=TOLD)
def test_neither_does_a_layer_that_is_converted_to_what_it_is(tell: Callable[..., Any]) -> None:
    """As the routers of Switch transformers are in each call, and experts that are moved to where
    their input is."""

    class Converts(Two):
        def forward(self, x: Tensor) -> Tensor:
            tell(self.a, x)
            return self.b(self.a(x))

    plain, model = twins(Converts(), "bfloat16")
    assert_trains_alike(model, plain)
    (plan,) = amp_graph.plans(model)
    assert plan.fallback is None and plan.converts


@IGNORING_AUTOCAST
def test_a_tensor_put_back_is_another_assignment() -> None:
    class PutsBack(Two):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.a.weight.data
            self.a.weight.data = weight * 2
            self.a.weight.data = weight
            return self.a(x)

    plain, model = twins(PutsBack(), "bfloat16")
    for _ in range(2):
        assert distance(model(X), plain(X)) <= BFLOAT16
    assert distance(model.a.weight, plain.a.weight) == 0
