"""Inputs and results of scaled graphs that share memory, and writes into them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import FLOAT16, assert_same_gradients, distance
from two_layers import Reverse

import amp_graph

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("error::amp_graph.ConversionWarning"),
]
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


class Halves(nn.Module):
    """The parts of one tensor, as many a policy or an autoencoder returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.first(x)
        return h, h[:, :5], h[:, 3:]


def write_a_part(h: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    scale.clamp_(min=-0.5)
    return mean.square().sum() + scale.exp().sum()


def write_the_whole(h: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    before = mean + scale
    h.mul_(0.5)
    return (before + mean * scale).sum()


def write_two_parts(h: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    scale /= 2
    mean += 1
    return (h.square().sum() + mean * scale).sum()


def write_what_was_used(h: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    loss = mean.square().sum()
    scale /= 2
    return loss


WRITES = [write_a_part, write_the_whole, write_two_parts]
Use = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.mark.parametrize("use", WRITES)
def test_results_are_written_to(use: Use) -> None:
    plain = Halves()
    model = amp_graph.convert(copy.deepcopy(plain), policy="float16")
    for each in (plain, model):
        use(*each(X)).backward()
    assert_same_gradients(model, plain)


def test_so_are_parts_of_what_is_not_returned() -> None:
    class Parts(Halves):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return super().forward(x)[1:]

    plain = Parts()
    model = amp_graph.convert(copy.deepcopy(plain), policy="float16")
    for each in (plain, model):
        write_two_parts(torch.zeros(()), *each(X)).backward()
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("use", WRITES)
def test_the_next_graph_writes_to_them(use: Use) -> None:
    class Broken(Halves):
        def forward(self, x: Tensor) -> Tensor:
            parts = super().forward(x)
            torch._dynamo.graph_break()
            return use(*parts) + self.second(parts[1]).sum()

    plain = Broken()
    model = amp_graph.convert(copy.deepcopy(plain), policy="float16")
    for each in (plain, model):
        each(X).backward()
    assert_same_gradients(model, plain)
    assert all(plan.fallback is None for plan in amp_graph.plans(model))


def test_a_write_that_autograd_objects_to_is_objected_to() -> None:
    plain = Halves()
    for each in (plain, amp_graph.convert(copy.deepcopy(plain), policy="float16")):
        loss = write_what_was_used(*each(X))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, part: Tensor) -> Tensor:
        part *= 2
        return self.layer(x) * x * part.sum()


def test_inputs_are_views_of_one_another() -> None:
    plain = Scaled()
    model = amp_graph.convert(copy.deepcopy(plain), policy="float16")
    gradients = []
    for each in (plain, model):
        leaf = X.clone().requires_grad_()
        x = leaf * 3
        each(x, x[:, :2]).sum().backward()
        gradients.append(leaf.grad)
    assert distance(gradients[1], gradients[0]) <= FLOAT16
    assert_same_gradients(model, plain)


class Product(nn.Module):
    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.layer, self.writes = nn.Linear(4, 4), writes

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.writes:
            x = x.mul_(2)
        return (self.layer(x) * y[:, :4]).sum()


def reversed_view(h: Tensor) -> tuple[Tensor, Tensor]:
    return h, Reverse.apply(h)


def hooked_view(h: Tensor) -> tuple[Tensor, Tensor]:
    view = h[:, :4]
    view.register_hook(lambda gradient: 3 * gradient)
    return h, view


def leaf_view(h: Tensor) -> tuple[Tensor, Tensor]:
    return h, h.detach().view_as(h).requires_grad_()


@pytest.mark.parametrize(
    ("make", "writes"),
    [(reversed_view, False), (hooked_view, False), (leaf_view, False)]
    + [(hooked_view, True), (leaf_view, True)],  # a reversed one may not be written to
)
def test_views_are_no_more_than_views(make: Callable[[Tensor], Any], writes: bool) -> None:
    """Where they are, their gradients go on to what they are views of by way of them."""
    plain = Product(writes)
    model = amp_graph.convert(copy.deepcopy(plain), policy="float16")
    gradients = []
    for each in (plain, model):
        leaf = X.clone().requires_grad_()
        each(*make(leaf * 3)).backward()
        gradients.append(leaf.grad)
    assert distance(gradients[1], gradients[0]) <= FLOAT16


def test_a_gradient_of_a_view_alone() -> None:
    plain = Product()
    model = amp_graph.convert(copy.deepcopy(plain), policy="float16")
    found = []
    for each in (plain, model):
        h = X.clone().requires_grad_() * 3
        parts = h[:, :], h[:2].expand(3, 2, 4)[:, 0]
        found.append(torch.autograd.grad(each(*parts), parts))
    assert all(distance(a, b) <= FLOAT16 for a, b in zip(found[1], found[0], strict=True))


def test_a_graph_returns_a_view_with_a_gradient_of_its_own() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return reversed_view(self.layer(x))

    plain = Both()
    model = amp_graph.convert(copy.deepcopy(plain), policy="float16")
    for each in (plain, model):
        h, view = each(X)
        (h.square().sum() + view.sum()).backward()
    assert_same_gradients(model, plain)


def test_two_parts_of_a_buffer_are_filled() -> None:
    class Fills(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, upper: Tensor, lower: Tensor) -> None:
            upper.copy_(self.first(x))
            lower.copy_(self.second(x))

    plain = Fills()
    model = amp_graph.convert(copy.deepcopy(plain), policy="float16")
    for each in (plain, model):
        buffer = torch.zeros(6, 4)
        parts = buffer[:3].detach(), buffer[3:].detach()  # views of nothing, for autograd
        each(X, *parts)
        sum(part.square().sum() for part in parts).backward()
    assert_same_gradients(model, plain)


class Hooked(Halves):
    """A gradient is changed on its way from a result to what it is a view of."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h, mean, scale = super().forward(x)
        scale.register_hook(lambda gradient: -2 * gradient)
        return h, mean, scale


class HookedInput(nn.Module):
    """The same of a view of what the graph is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        columns = x[:, :2]
        columns.register_hook(lambda gradient: -2 * gradient)
        return columns, self.layer(x)


class Rows(nn.Module):
    """Writes into a view, of which the caller holds the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.layer = nn.Parameter(torch.tensor(0.8)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = x * 1
        part = h[1:]
        torch._dynamo.graph_break()
        part.mul_(self.factor)
        part.tanh_()
        return h, self.layer(part)


class Cache(nn.Module):
    """Fills a part of what requires no gradient, and returns the part."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        cache = torch.zeros(5, 4)
        torch._dynamo.graph_break()
        part = cache[1:4]
        part.copy_(self.layer(x))
        return part, cache[2:] * 2, cache


class Detached(nn.Module):
    """Two tensors of one memory, of which autograd knows nothing in common."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.layer(x)
        alias = h.detach()
        torch._dynamo.graph_break()
        alias[:1].mul_(self.layer.bias)
        return (h[1],)


@pytest.mark.parametrize("make", [Hooked, HookedInput, Rows, Cache, Detached])
def test_gradients_of_results(make: type[nn.Module]) -> None:
    plain = make()
    model = amp_graph.convert(copy.deepcopy(plain), policy="float16")
    inputs = []
    for each in (plain, model):
        leaf = X.clone().requires_grad_()
        sum((result * (i + 1)).square().sum() for i, result in enumerate(each(leaf))).backward()
        inputs.append(leaf.grad)
    assert distance(inputs[1], inputs[0]) <= FLOAT16
    assert_same_gradients(model, plain)
