"""Gradients of gradients, and the adversarial networks that need them.

Magnitudes are such that float16 without a scale would lose what the test looks at.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from training import (
    FLOAT16,
    Mlp,
    X,
    assert_same_gradients,
    distance,
    gradients,
    same,
    scaled,
    snapshot,
    twins,
)

import amp_graph

REAL = torch.randn(8, 4, generator=torch.Generator().manual_seed(3)) + 1
SMALL = 1e-6  # float16's smallest number is 6e-8, its smallest with full precision 6e-5
SCALED = scaled(2.0**10)


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def gradient(out: Tensor, x: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return found


def input_penalty(model: nn.Module, x: Tensor) -> Tensor:
    """WGAN-GP's (Gulrajani et al. 2017)."""
    return (gradient(model(x), x).norm(dim=1) - 1).square().mean()


def small_input_penalty(model: nn.Module, x: Tensor) -> Tensor:
    return (gradient(model(x) * SMALL, x) / SMALL).square().sum() * SMALL


def weight_penalty(model: nn.Module, x: Tensor) -> Tensor:
    """PyTorch's AMP examples: the norm of the gradients of the parameters."""
    loss = model(x).square().mean()
    found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + torch.stack([g.square().sum() for g in found]).sum().sqrt()


def penalty_alone(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean() * SMALL
    found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return torch.stack([g.square().sum() for g in found]).sum() / SMALL


def mixed_penalty(model: nn.Module, x: Tensor) -> Tensor:
    """The gradient of the input leaves the graph, the penalty's comes by the weights too."""
    return (gradient(model(x), x) * model.first.weight.sum(0)).sum()


PENALTIES = [input_penalty, small_input_penalty, weight_penalty, penalty_alone, mixed_penalty]


@pytest.mark.parametrize("penalty", PENALTIES)
def test_double_backward(penalty: Callable[[nn.Module, Tensor], Tensor]) -> None:
    plain, model = twins(Mlp(), SCALED)
    values = []
    for each in (plain, model):
        x = X.clone().requires_grad_()
        value = penalty(each, x)
        value.backward()
        values.append((value, x.grad))
    (expected, dx), (value, dx_mixed) = values
    assert distance(value, expected) <= FLOAT16
    assert distance(dx_mixed, dx) <= FLOAT16
    assert_same_gradients(model, plain)
    assert all(g is None or bool(g.any()) for g in gradients(model))


@pytest.mark.parametrize("penalty", [small_input_penalty, penalty_alone])
def test_without_a_scale_the_small_ones_are_lost(penalty: Any) -> None:
    """The measure of the test above."""
    plain, model = twins(Mlp(), amp_graph.Policy("float16", loss_scale=None))
    for each in (plain, model):
        penalty(each, X.clone().requires_grad_()).backward()
    p, q = model.first.weight, plain.first.weight
    assert distance(p.grad, q.grad) > 10 * FLOAT16


def test_third_derivative() -> None:
    plain, model = twins(Mlp(), scaled(2.0**14))  # 2^10 leaves too few bits
    found = []
    for each in (plain, model):
        x = X.clone().requires_grad_()
        first = gradient(each(x) * SMALL, x)
        second = gradient(first, x)
        third = gradient(second, x)
        ((third / SMALL).square().sum() * SMALL).backward()
        found.append((first, second, third))
    for value, reference in zip(found[1], found[0], strict=True):
        assert distance(value, reference) <= FLOAT16
    assert_same_gradients(model, plain)


def test_a_second_derivative_into_an_accumulated_gradient() -> None:
    plain, model = twins(Mlp(), SCALED)
    for each in (plain, model):
        x = X.clone().requires_grad_()
        each(x).square().mean().backward()
        input_penalty(each, x).backward()
        weight_penalty(each, x).backward()
    assert_same_gradients(model, plain)


def test_hessian_vector_product() -> None:
    plain, model = twins(Mlp(), SCALED)
    found = []
    for each in (plain, model):
        parameters = list(each.parameters())
        grads = torch.autograd.grad(each(X).square().mean(), parameters, create_graph=True)
        direction = [torch.ones_like(p) for p in parameters]
        found.append(torch.autograd.grad(grads, parameters, direction))
    for value, reference in zip(found[1], found[0], strict=True):
        assert distance(value, reference) <= FLOAT16


def test_maml_inner_step() -> None:
    """One differentiable step of the weights (Finn et al. 2017), by functional_call."""
    plain, model = twins(Mlp(), SCALED)
    for each in (plain, model):
        parameters = dict(each.named_parameters())
        loss = torch.func.functional_call(each, parameters, (X,)).square().mean()
        grads = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        stepped = {
            name: p - 0.5 * g for (name, p), g in zip(parameters.items(), grads, strict=True)
        }
        torch.func.functional_call(each, stepped, (REAL,)).square().mean().backward()
    assert_same_gradients(model, plain)


class Gan:
    """The usual script: three backward calls in a step, two optimizers, one shared graph."""

    def __init__(self, mixed: bool, penalty: bool):
        torch.manual_seed(0)
        self.generator, self.critic = Mlp(outputs=4), Mlp(outputs=1)
        self.penalty = penalty
        self.of_generator = torch.optim.Adam(self.generator.parameters(), lr=0.01, eps=1e-3)
        self.of_critic = torch.optim.Adam(self.critic.parameters(), lr=0.01, eps=1e-3)
        if mixed:
            amp_graph.convert(self.generator, self.of_generator, policy=SCALED)
            amp_graph.convert(self.critic, self.of_critic, policy=SCALED)

    def step(self, noise: Tensor, bad: str = "") -> tuple[bool, bool]:
        """Returns whether each optimizer was to step."""
        bce = nn.functional.binary_cross_entropy_with_logits
        ones, zeros = torch.ones(len(noise), 1), torch.zeros(len(noise), 1)
        fake = self.generator(noise)
        self.of_critic.zero_grad()
        bce(self.critic(REAL), ones).backward()
        bce(self.critic(fake.detach()), zeros).backward()
        if self.penalty:
            between = ((REAL + fake) / 2).detach().requires_grad_()
            (input_penalty(self.critic, between) * 0.1).backward()
        if bad == "critic":
            self.critic.first.bias.grad[0] = torch.inf
        told_critic = self._step(self.of_critic, bad == "critic")
        self.of_generator.zero_grad()
        bce(self.critic(fake), ones).backward()
        if bad == "generator":
            self.generator.first.bias.grad[0] = torch.nan
        told_generator = self._step(self.of_generator, bad == "generator")
        return told_critic, told_generator

    def _step(self, optimizer: torch.optim.Optimizer, bad: bool) -> bool:
        told = optimizer.step() if not bad or hasattr(optimizer.step, "__wrapped__") else False
        return told is None or bool(told)


@pytest.mark.parametrize("penalty", [False, True], ids=["three backwards", "gradient penalty"])
def test_a_gan(penalty: bool) -> None:
    plain, mixed = Gan(False, penalty), Gan(True, penalty)
    amp_graph.convert(copy.deepcopy(plain.critic), policy=SCALED)  # a bystander
    for i, bad in enumerate(["", "critic", "", "generator", ""]):
        noise = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 + i))
        if bad:
            skipping = plain.of_critic if bad == "critic" else plain.of_generator
            keep, skipping.step = skipping.step, lambda: False  # type: ignore[method-assign]
            plain.step(noise, bad)
            skipping.step = keep  # type: ignore[method-assign]
        else:
            plain.step(noise)
        assert mixed.step(noise, bad) == (bad != "critic", bad != "generator")
    for name in ("generator", "critic"):
        pairs = zip(
            getattr(mixed, name).parameters(), getattr(plain, name).parameters(), strict=True
        )
        for p, q in pairs:
            assert distance(p, q) <= FLOAT16, name


@pytest.mark.parametrize("penalty", PENALTIES, ids=lambda p: p.__name__)
def test_the_scale_may_change_between_a_derivative_and_its_own(penalty: Any) -> None:
    """An update is skipped and the next forward halves the scale, in place."""
    reference, model = twins(Mlp(), SCALED)
    x = torch.randn(8, 4, requires_grad=True)
    penalties = [penalty(m, x) for m in (reference, model)]
    scale = amp_graph.scale_of(model)
    before = scale.get_scale()
    next(model.parameters()).grad = torch.full_like(next(model.parameters()), math.inf)
    assert not amp_graph.has_finite_gradients(model)
    model(x)
    assert scale.get_scale() == before / 2
    model.zero_grad()
    for each in penalties:
        each.backward()
    assert_same_gradients(model, reference, within=2 * FLOAT16)


@pytest.mark.parametrize("penalty", [input_penalty, weight_penalty, mixed_penalty])
def test_no_penalty_is_infinite_at_the_first_scale(penalty: Any) -> None:
    """The gradient of a sum begins with 1: times 65536 it would be infinite in float16 at once, and
    the script would see that in its loss, though the step would be skipped."""
    expected, value = (penalty(each, X.clone().requires_grad_()) for each in twins(Mlp()))
    assert distance(value, expected) <= FLOAT16


class AdaHessian(torch.optim.Optimizer):
    """Yao et al. (2021): asks for a second derivative in its step, which it keeps."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        signs = [torch.where(p.detach() > 0, 1.0, -1.0) for p in parameters]
        gradients = [p.grad for p in parameters]
        products = torch.autograd.grad(gradients, parameters, grad_outputs=signs)
        for p, product in zip(parameters, products, strict=True):
            self.state[p]["hessian"] = product
            with torch.no_grad():
                p -= 0.05 * p.grad / (product.abs() + 0.1)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("is_attached", [True, False], ids=["attached", "found"])
def test_a_second_derivative_inside_of_a_step(is_attached: bool) -> None:
    """Nobody looks at it any more."""
    plain = Mlp()
    model = copy.deepcopy(plain)
    optimizers = [AdaHessian(m.parameters()) for m in (plain, model)]
    amp_graph.convert(model, optimizers[1] if is_attached else None, policy="float16")
    for _ in range(3):
        model.load_state_dict(plain.state_dict())
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each.zero_grad()
            (each(X * 6).square().sum() * 10).backward(create_graph=True)
            optimizer.step()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            expected, found = (
                o.state[w]["hessian"] for o, w in zip(optimizers, (p, q), strict=True)
            )
            assert distance(found, expected) <= 4 * FLOAT16


class Curved(SGD):
    """Takes second derivatives inside of its step, as AdaHessian does."""

    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        gradients = [p.grad for p in parameters]
        self.curvature = torch.autograd.grad(gradients, parameters, gradients)
        return super().step(closure)


def test_second_derivatives_of_gradients_that_overflowed() -> None:
    """In the very step in which the optimizer is found."""
    model = Mlp()
    optimizer = Curved(model.parameters(), lr=0.1)
    amp_graph.convert(model, policy=SCALED)
    before = snapshot(model, optimizer)
    (model(X) * math.inf).square().mean().backward(create_graph=True)
    optimizer.step()
    assert same(snapshot(model, optimizer), before)
