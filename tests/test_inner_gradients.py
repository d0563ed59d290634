"""Gradients that a model takes within its forward, by values that it computed itself."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn.functional import linear
from training import assert_same_gradients, distance, twins
from two_layers import BFLOAT16, POLICIES, Two, X

import amp_graph
from amp_graph import Policy
from amp_graph.backend.by_name import backend

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def slope(u: Tensor, h: Tensor) -> Tensor:
    """Zero where `u` does not depend on `h`, which loses a term of a loss without a word."""
    (found,) = torch.autograd.grad(u.sum(), h, create_graph=True, allow_unused=True)
    return torch.zeros(()) if found is None else found


class Energy(Two):
    """The slope of an energy by features, as in energy-based models."""

    def features(self, x: Tensor) -> Tensor:
        return self.a(x)

    def energy(self, h: Tensor) -> Tensor:
        return self.b(torch.tanh(h))

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        u = self.energy(h)
        return u.square().mean() + slope(u, h).square().sum()


class ByCoordinates(Energy):
    """A differential equation, by columns of the input (PINN)."""

    def forward(self, x: Tensor) -> Tensor:
        t, r = x[:, :1], x[:, 1:]
        u = self.energy(self.a(torch.cat([t, r], 1)))
        u_t = slope(u, t)
        return (u + u_t - 0.1 * slope(u_t, t)).square().mean() + slope(u, r).square().mean()


class ByProduct(Energy):
    def features(self, x: Tensor) -> Tensor:
        return x * 1


class ByTransposed(Energy):
    def features(self, x: Tensor) -> Tensor:
        return x.t()

    def energy(self, h: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(h.t())))


class Filled(Energy):
    """The value is written to in parts."""

    def features(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape)
        h[:, :3] = x[:, :3]
        h[:, 3:] = self.a(x)[:, 3:]
        return h


class Written(Energy):
    """The value reaches the energy by a write."""

    def energy(self, h: Tensor) -> Tensor:
        buffer = torch.zeros(h.shape)
        buffer[:, :] = h
        return self.b(torch.tanh(buffer))


class Mapped(Energy):
    def features(self, x: Tensor) -> Tensor:
        return torch.vmap(self.a)(x)

    def energy(self, h: Tensor) -> Tensor:
        return torch.vmap(self.b)(h.tanh())


class Chunks(Energy):
    """What an operator with several results returns goes to the next part."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        one, other = h.chunk(2, -1)
        u = self.energy(torch.cat([other, one], -1))
        return u.square().mean() + slope(u, h).square().sum() + slope(u, one).square().sum()


class Recorded(Energy):
    """Recording is turned on and off around the value."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean = self.a(x).mean()
            with torch.enable_grad():
                h = self.a(x)
                u = self.energy(h)
            assert not torch.is_grad_enabled()
            scale = self.a(x).norm()
        return u.square().mean() + slope(u, h).square().sum() * scale + mean


class OwnRegion(Energy):
    """An autocast region of the model's own goes on over the value."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.b(self.a(x))
        with torch.autocast("cpu", torch.bfloat16):
            h = self.a(x)
            u = self.energy(h)
        u = u.float() + z
        return u.square().mean() + slope(u, h).float().square().sum()


class InnerStep(Energy):
    """By weights that were computed, as those of a learner (MAML)."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.a.weight * 2
        loss = linear(x, w).tanh().square().mean()
        return self.b(linear(x, w - 0.5 * slope(loss, w)).tanh()).square().mean()


class Interpolated(Energy):
    """The penalty on a critic between data and what a generator makes (WGAN-GP)."""

    def forward(self, x: Tensor) -> Tensor:
        mixed = 0.3 * x + 0.7 * self.a(x)
        u = self.b(mixed).tanh()
        return (slope(u, mixed).norm(dim=1) - 1).square().mean() + u.mean()


class Imported(Energy):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        u = self.energy(h)
        (found,) = grad(u.sum(), h, create_graph=True, allow_unused=True)
        return u.square().mean() + (0 if found is None else found.square().sum())


class Said(Energy):
    """The graph ends elsewhere than at the gradient, and both leave it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        u = self.energy(h)
        print(end="")
        return u.square().mean() + slope(u, h).square().sum()


class Held(Two):
    def __init__(self) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        u = self.b(torch.tanh(h))
        print(end="")
        return u.square().mean() + self.slope(u, h).square().sum()


class Parts(nn.Module):
    """Both are results of a part that takes no gradient, in a loop that cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Pair()

    def forward(self, x: Tensor) -> Tensor:
        loss = torch.zeros(())
        for _ in range(2):
            h, u = self.part(x)
            loss = loss + u.square().mean() + slope(u, h).square().sum()
            x = h
        return loss


class Pair(Two):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return h, self.b(torch.tanh(h))


KINDS = [Energy, ByCoordinates, ByProduct, ByTransposed, Filled, Written, Mapped, Chunks, Recorded,
         OwnRegion, InnerStep, Interpolated, Imported, Said, Held, Parts]  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_those_of_the_plain_model(kind: type[nn.Module], policy: Policy) -> None:
    plain, model = twins(kind(), policy)
    for _ in range(2):
        inputs = [X.clone().requires_grad_() for _ in range(2)]
        losses = [each(x) for each, x in zip((plain, model), inputs, strict=True)]
        for loss in losses:
            loss.backward()
        assert distance(losses[1], losses[0]) <= BFLOAT16
        assert distance(inputs[1].grad, inputs[0].grad) <= BFLOAT16
    assert_same_gradients(model, plain, BFLOAT16)
    plans = amp_graph.plans(model)
    assert any(part.low for plan in plans for part in plan.parts())
    assert not any(plan.fallback for plan in plans)


class Forces(Energy):
    """No second derivative is taken: a force field in use."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        (found,) = torch.autograd.grad(self.energy(h).sum(), h, allow_unused=True)
        return torch.zeros(()) if found is None else -found


@pytest.mark.parametrize("around", [torch.no_grad, torch.enable_grad])
def test_they_are_in_evaluation_too(around: Any) -> None:
    class Evaluated(Forces):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                return super().forward(x)

    plain, model = twins(Evaluated().eval(), Policy("bfloat16"))
    with around():
        assert distance(model(X), plain(X)) <= BFLOAT16


@pytest.mark.usefixtures("traced")
def test_they_are_with_inductor() -> None:
    plain, model = twins(Forces(), Policy("bfloat16", compiler="inductor"))
    assert distance(model(X), plain(X)) <= BFLOAT16
    assert not any(plan.uncompiled for plan in amp_graph.plans(model))


def test_they_are_where_a_backward_pass_takes_them() -> None:
    class Saliency(Energy):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            h.retain_grad()
            self.energy(h).sum().backward(inputs=[h])
            return h.grad

    plain, model = twins(Saliency(), Policy("bfloat16"))
    assert distance(model(X), plain(X)) <= BFLOAT16


def test_they_are_under_torch_compile() -> None:
    plain = Forces()
    compiled = torch.compile(copy.deepcopy(plain), backend=backend)
    assert distance(compiled(X), plain(X)) <= BFLOAT16


def test_they_are_in_copies() -> None:
    plain, model = twins(Energy(), Policy("bfloat16"))
    for each in (model, copy.deepcopy(model)):  # called by the same graphs
        assert distance(each(X), plain(X)) <= BFLOAT16


def test_they_are_in_comparisons() -> None:
    comparison = amp_graph.compare(Energy(), X, policy="bfloat16")
    assert 0 < comparison.outputs <= BFLOAT16


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("around", [contextlib.nullcontext(), torch.device("cpu")])
@pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning")
def test_hooks_on_the_value_are_heard(policy: Policy, around: Any) -> None:
    class Doubled(Energy):
        def features(self, x: Tensor) -> Tensor:
            h = super().features(x)
            h.register_hook(lambda g: g * 2)
            return h

    plain, model = twins(Doubled(), policy)
    for _ in range(2):
        with around:
            losses = [each(X) for each in (plain, model)]
        for loss in losses:
            loss.backward()
        assert distance(losses[1], losses[0]) <= BFLOAT16
    assert_same_gradients(model, plain, BFLOAT16)
