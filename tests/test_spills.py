"""What overflows in one model and spills into others is skipped there, and lowers the right scale.

Nothing is injected: 65536 times a gradient of 10 is more than float16 holds.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from training import scaled

import amp_graph

Z = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "no_other_scales")


def generator() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))


def discriminator() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


class Polyak(SGD):
    """Moves before it evaluates."""

    def step(self, closure):  # type: ignore[no-untyped-def,override]
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.mul_(1.001)
        closure()
        return super().step()


def are_finite(model: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("known", [True, False], ids=["known", "found"])
def test_a_generator_steps_again_once_the_discriminator_s_scale_is_lower(known: bool) -> None:
    G, D = generator(), discriminator()
    of_g, of_d = SGD(G.parameters(), lr=1e-3), SGD(D.parameters(), lr=1e-3)
    for model, optimizer in ((G, of_g), (D, of_d)):
        amp_graph.convert(model, optimizer if known else None, policy="float16")
    for _ in range(12):
        of_d.zero_grad()
        D(G(Z).detach()).mean().backward()
        of_d.step()
        of_g.zero_grad()
        (10 * D(G(Z)).mean()).backward()
        of_g.step()
    counts = amp_graph.step_counts(of_g)
    assert 0 < counts.skipped < 4 and counts.stepped + counts.skipped == 12
    assert amp_graph.scale_of(D).get_scale() < 2.0**16
    assert amp_graph.scale_of(G).get_scale() >= 2.0**15
    assert are_finite(G) and are_finite(D)


@pytest.mark.parametrize("optimizer", [SGD, AdamW])
def test_no_overflow_reaches_a_plain_model_in_front(optimizer: type[Optimizer]) -> None:
    G, D = generator(), discriminator()
    of_g, of_d = optimizer(G.parameters(), lr=1e-3), SGD(D.parameters(), lr=1e-3)
    amp_graph.convert(D, of_d, policy="float16")
    for _ in range(6):
        of_d.zero_grad()
        of_g.zero_grad()
        (10 * D(G(Z)).mean()).backward()
        of_d.step()
        of_g.step()
    assert are_finite(G)
    assert amp_graph.step_counts(of_g).stepped > 0 and amp_graph.step_counts(of_g).skipped > 0


def test_no_overflow_reaches_a_parameter_that_is_given() -> None:
    model, prompt = nn.Linear(4, 2), nn.Parameter(torch.randn(8, 4))
    of_model, of_prompt = SGD(model.parameters(), lr=1e-3), SGD([prompt], lr=1e-3)
    amp_graph.convert(model, of_model, policy=scaled(2.0**20))
    for _ in range(6):
        of_prompt.zero_grad()
        model(prompt).sum().backward()
        of_prompt.step()
    assert prompt.isfinite().all()
    assert amp_graph.step_counts(of_prompt).stepped > 0


def test_what_nobody_steps_is_watched_by_those_it_spills_into() -> None:
    G, D = generator(), discriminator().requires_grad_(False)
    of_g = SGD(G.parameters(), lr=1e-3)
    for model in (G, D):
        amp_graph.convert(model, policy=scaled(2.0**10, growth_interval=4))
    for _ in range(6):
        of_g.zero_grad()
        D(G(Z)).mean().backward()
        of_g.step()
    assert amp_graph.step_counts(of_g).stepped == 6
    assert amp_graph.scale_of(D).get_scale() == 2.0**11  # after four of them


def test_steps_of_others_are_no_sign_that_the_scale_could_be_larger() -> None:
    G, D, other = generator(), discriminator(), nn.Linear(2, 2)
    of_d, of_other = SGD(D.parameters(), lr=1e-3), SGD(other.parameters(), lr=1e-3)
    amp_graph.convert(D, of_d, policy=scaled(2.0**10, growth_interval=2))
    for _ in range(2):
        D(G(Z)).mean().backward()
        of_d.step()
        D(G(Z)).mean().backward()
        for _ in range(3):
            other(torch.ones(1, 2)).sum().backward()
            of_other.step()
    assert amp_graph.scale_of(D).get_scale() == 2.0**11
    assert amp_graph.step_counts(of_other).skipped == 0


def test_so_are_those_of_parameters_that_the_model_has_no_more() -> None:
    model = discriminator()
    optimizers = [SGD(layer.parameters(), lr=1e-3) for layer in (model[0], model[2])]
    amp_graph.convert(model, optimizers, policy=scaled(2.0**10, growth_interval=2))
    model[2] = nn.Linear(16, 1)
    for steps in ((0, 1), (1,), (1,)):
        model(torch.ones(1, 8)).sum().backward()
        for i in steps:
            optimizers[i].step()
    assert amp_graph.scale_of(model).get_scale() == 2.0**10


def test_an_update_by_hand_blames_the_model_that_spilled() -> None:
    G, D = generator(), discriminator()
    for model in (G, D):
        amp_graph.convert(model, policy="float16")
    amp_graph.has_finite_gradients(D)  # from now on somebody watches
    amp_graph.has_finite_gradients(G)
    went_on = []
    for _ in range(6):
        G.zero_grad()
        (10 * D(G(Z)).mean()).backward()
        went_on.append(amp_graph.has_finite_gradients(G))
        assert not went_on[-1] or all(p.grad.isfinite().all() for p in G.parameters())
    assert went_on[-1] and not went_on[0]
    assert amp_graph.scale_of(G).get_scale() >= 2.0**15


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        print(end="")  # ends a graph
        return self.second(hidden)


def test_what_goes_from_graph_to_graph_of_one_model_is_no_spill() -> None:
    model = TwoInputs()
    optimizer = SGD(model.parameters(), lr=1e-3)
    amp_graph.convert(model, optimizer, policy="float16")
    model(Z).sum().backward()
    assert not amp_graph.scale_of(model).may_have_spilled(optimizer)


def test_only_the_first_step_of_each_optimizer_after_a_spill_is_looked_at() -> None:
    G, D = generator(), discriminator()
    amp_graph.convert(D, SGD(D.parameters(), lr=1e-3), policy="float16")
    D(G(Z)).sum().backward()  # and D is never called again
    for _ in range(2):
        other = nn.Linear(4, 4)
        optimizer = SGD(other.parameters(), lr=1e-3)
        for _ in range(3):
            other(Z).sum().backward()
            optimizer.step()
        counts = amp_graph.step_counts(optimizer)
        assert (counts.stepped, counts.skipped) == (1, 0)


@pytest.mark.parametrize("steps", [1, 6])
@pytest.mark.parametrize("kind", [SGD, LBFGS, Polyak])
def test_no_overflow_in_a_closure_reaches_a_plain_model(kind: type[Optimizer], steps: int) -> None:
    """From the first step on, when nothing is known of the optimizer yet."""
    G, D = generator(), discriminator()
    amp_graph.convert(D, SGD(D.parameters(), lr=1e-3), policy="float16")
    optimizer = kind(G.parameters(), lr=1e-3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = 10 * D(G(Z)).mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    assert are_finite(G)
    assert amp_graph.step_counts(optimizer).skipped > 0


def test_an_optimizer_without_a_scale_keeps_its_closure_to_itself() -> None:
    amp_graph.convert(discriminator(), policy="float16")
    model, calls = nn.Linear(4, 4), []
    optimizer = LBFGS(model.parameters(), max_iter=3)

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = model(Z).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert all(calls) and len(calls) >= 3
    assert amp_graph.step_counts(optimizer).stepped == 0


def test_flags_are_float32_whatever_the_default_is() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        G, D = generator().float(), discriminator().float()
        amp_graph.convert(D, SGD(D.parameters(), lr=1e-3), policy="float16")
        D(G(Z)).mean().backward()
        assert all(bool(p.grad.isfinite().all()) for p in G.parameters())
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_gradient_that_is_only_looked_at_lowers_no_scale() -> None:
    """It may be NaN by the loss, of a task that is logged, say."""
    G, D = generator(), discriminator()
    optimizer = SGD([*G.parameters(), *D.parameters()], lr=1e-3)
    for model in (G, D):
        amp_graph.convert(model, optimizer, policy=scaled(2.0**4))
    for _ in range(6):
        optimizer.zero_grad()
        result = D(G(Z))
        torch.autograd.grad((result - result).sqrt().sum(), [*G.parameters()], retain_graph=True)
        result.mean().backward()
        assert optimizer.step() is True
    assert amp_graph.scale_of(D).get_scale() == 2.0**4


def test_a_model_that_was_trained_and_is_frozen_is_scaled_up_again() -> None:
    G, D = generator(), discriminator()
    of_g, of_d = SGD(G.parameters(), lr=1e-3), SGD(D.parameters(), lr=1e-3)
    amp_graph.convert(D, of_d, policy=scaled(2.0**10, growth_interval=2))
    D(G(Z)).mean().backward()
    of_d.step()
    D.requires_grad_(False)
    before = amp_graph.scale_of(D).get_scale()
    for _ in range(6):
        of_g.zero_grad()
        D(G(Z)).mean().backward()
        of_g.step()
    assert amp_graph.scale_of(D).get_scale() > before


def test_updates_by_hand_are_scaled_beside_the_grad_scaler_of_another_model() -> None:
    other, model = nn.Linear(4, 4), amp_graph.convert(discriminator(), policy="float16")
    scaler, optimizer = torch.amp.GradScaler("cpu"), SGD(other.parameters(), lr=1e-3)
    for _ in range(2):
        scaler.scale(other(Z).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        model(torch.randn(4, 8)).mean().backward()
        amp_graph.has_finite_gradients(model)
    assert amp_graph.scale_of(model).get_scale() > 1


@pytest.mark.parametrize("kind", ["own", "everybody's"])
@pytest.mark.parametrize("policy", ["float16", None])
def test_hooks_of_a_step_come_before_its_closure(kind: str, policy: str | None) -> None:
    """One that clears gradients, say, must not clear those that the closure made."""
    amp_graph.convert(discriminator(), policy="float16")  # in use, whoever steps
    model = nn.Linear(4, 4)
    if policy:
        amp_graph.convert(model, policy=policy)
    optimizer, order = SGD(model.parameters(), lr=0.1), []
    add = optimizer.register_step_pre_hook if kind == "own" else register_optimizer_step_pre_hook
    hook = add(lambda *_: order.append("hook"))

    def closure() -> Tensor:
        order.append("closure")
        optimizer.zero_grad()
        loss = model(Z).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    hook.remove()
    assert order == ["hook", "closure"] * 3
