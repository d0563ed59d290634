"""What the loss scale is for: gradients that underflow, and overflows that do not end."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from training import FLOAT16, Mlp, X, Y, overflow, same, snapshot

import amp_graph
from amp_graph import LossScale, Policy, StepCounts

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Tiny(Mlp):
    """Its loss is so small that gradients of 1e-9 reach the layers: float16 ends at 6e-8."""

    def loss(self) -> Tensor:
        return (self(X) - Y).square().mean() * 1e-8


def final_loss(policy: Policy | None) -> float:
    torch.manual_seed(0)
    model = Tiny()
    optimizer = SGD(model.parameters(), lr=3e7)
    if policy is not None:
        amp_graph.convert(model, optimizer, policy=policy)
    for _ in range(30):
        optimizer.zero_grad()
        model.loss().backward()
        optimizer.step()
    return model.loss().item() * 1e8


def test_an_underflowing_network_learns_only_with_scaling() -> None:
    torch.manual_seed(0)
    start = Tiny().loss().item() * 1e8
    float32 = final_loss(None)
    assert float32 < 0.5 * start
    unscaled = final_loss(Policy("float16", loss_scale=None))
    assert unscaled > 0.95 * start
    mixed = final_loss(Policy("float16"))
    # Thirty steps through values of 11 bits: what is left of the loss agrees to two digits.
    assert mixed == pytest.approx(float32, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(SGD, {"momentum": 0.9}), (SGD, {"fused": True}), (AdamW, {"foreach": True}),
     (AdamW, {"fused": True})],
    ids=["SGD", "SGD fused", "AdamW foreach", "AdamW fused"],
)  # fmt: skip
def test_200_overflows_in_a_row_leave_a_usable_run(kind: Any, options: Any) -> None:
    model = Mlp()
    optimizer = kind(model.parameters(), lr=0.1, **options)
    policy = Policy("float16", loss_scale=LossScale(abort_after=None))
    amp_graph.convert(model, optimizer, policy=policy)
    before = snapshot(model)
    for _ in range(200):
        optimizer.zero_grad()
        model(X * math.inf).sum().backward()
        assert not optimizer.step()
        assert amp_graph.scale_of(model).get_scale() >= 2.0**-14
    assert same(snapshot(model), before)
    assert amp_graph.scale_of(model).get_scale() == LossScale().floor == 2.0**-14
    assert amp_graph.step_counts(optimizer) == StepCounts(0, 200)
    model.zero_grad()
    model(X).sum().backward()
    assert optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
    assert not same(snapshot(model), before)


def test_grad_scaler_does_not_survive_200_overflows() -> None:
    """The measure of the test above: the same run, in float32, under torch.amp.GradScaler."""
    model = Mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for overflows in [True] * 200 + [False]:
        optimizer.zero_grad()
        scaler.scale(model(X * math.inf if overflows else X).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 0.0
    assert all(p.isnan().all() for p in model.parameters())


def test_ours_as_an_object_survives_them() -> None:
    model = Mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = amp_graph.GradScaler("cpu")
    for overflows in [True] * 200 + [False]:
        optimizer.zero_grad()
        scaler.scale(model(X * math.inf if overflows else X).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**-14
    assert all(p.isfinite().all() for p in model.parameters())


def test_without_an_optimizer_gradients_are_finite_and_true() -> None:
    """Nobody would skip a step here, so the scale keeps well below what overflows."""
    plain = Mlp()
    model = amp_graph.convert(copy.deepcopy(plain), policy="float16")
    for factor in (1.0, 1e3, 1e-6, 0.0):
        found = []
        for each in (plain, model):
            x = X.clone().requires_grad_()
            found.append(torch.autograd.grad(each(x).sum() * factor, [x, *each.parameters()]))
        for reference, value in zip(*found, strict=True):
            assert value.isfinite().all()
            assert (value - reference).norm() <= FLOAT16 * reference.norm()


def test_once_an_optimizer_is_known_the_scale_is_the_policy_s() -> None:
    model = amp_graph.convert(Mlp(), policy="float16")
    optimizer = SGD(model.parameters(), lr=0.1)
    skipped = []
    for _ in range(3):
        model.zero_grad()
        model(X)[0].sum().backward()
        optimizer.step()
        skipped.append(amp_graph.step_counts(optimizer).skipped)
    assert skipped == [0, 1, 1], "2^16 times 1 is beyond float16, 2^15 is not"


def test_a_raw_loop_that_asks_and_adam_beside_it() -> None:
    model = amp_graph.convert(Mlp(), policy="float16")
    scale = amp_graph.scale_of(model)
    for overflows, expected in [(False, 16), (True, 15), (True, 14), (False, 14)]:
        model.zero_grad()
        model(X).mean().backward()
        if overflows:
            overflow(model)
        assert amp_graph.has_finite_gradients(model) is not overflows
        assert math.log2(scale.get_scale()) == expected
    optimizer = Adam(model.parameters(), lr=0.1)
    before = snapshot(model, optimizer)
    model(X).mean().backward()
    overflow(model)
    optimizer.step()
    assert same(snapshot(model, optimizer), before)


def test_an_overflow_that_is_clipped_by_value_is_one_all_the_same() -> None:
    """As with GradScaler, which looks before the clipping."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    scaler = torch.amp.GradScaler("cpu")
    plain, x = copy.deepcopy(model), torch.linspace(-1, 1, 16).view(4, 4)
    optimizers = [SGD(m.parameters(), lr=0.01) for m in (model, plain)]
    amp_graph.convert(model, optimizers[0], policy="float16")
    target = torch.tensor([[0.0], [0.0], [0.0], [10.0]])
    stepped = []
    for _ in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (model(x) - target).square().mean().backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        stepped.append(optimizers[0].step())
        with torch.autocast(x.device.type, torch.float16):
            result = plain(x)
        scaler.scale((result.float() - target).square().mean()).backward()
        scaler.unscale_(optimizers[1])
        nn.utils.clip_grad_value_(plain.parameters(), 1.0)
        scaler.step(optimizers[1])
        scaler.update()
    assert False in stepped and stepped[-1] is True
    assert amp_graph.scale_of(model).get_scale() == scaler.get_scale()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
