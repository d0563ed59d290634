"""Scripts that scale by hand: torch's GradScaler, amp_graph.GradScaler, Apex's scale_loss."""

from __future__ import annotations

import copy
import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW
from training import (
    FLOAT16,
    Mlp,
    X,
    Y,
    assert_same_gradients,
    distance,
    overflow,
    same,
    scaled,
    snapshot,
    twins,
)

import amp_graph
from amp_graph import AmpGraphError, GradScaler
from amp_graph.scaling import explicit_scalers

SCALERS = [lambda **k: torch.amp.GradScaler("cpu", **k), GradScaler]

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def loss_of(model: nn.Module) -> Tensor:
    return (model(X) - Y).square().mean()


@pytest.mark.parametrize("make", SCALERS, ids=["torch", "ours"])
@pytest.mark.parametrize("attached", [True, False])
def test_under_a_grad_scaler_graphs_do_not_scale(make: Any, attached: bool) -> None:
    plain = Mlp()
    model = copy.deepcopy(plain)
    scaler = make(init_scale=2.0**12)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    amp_graph.convert(model, [optimizer] if attached else [], policy="float16")
    reference = SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for overflows in (False, True, False):
        plain.zero_grad()
        model.zero_grad()
        loss_of(plain).backward()
        loss = loss_of(model)
        scaler.scale(loss).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert distance(p.grad / scaler.get_scale(), q.grad) < FLOAT16
        if overflows:
            overflow(model)
        before = snapshot(model, optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert same(snapshot(model, optimizer), before) is overflows
        if not overflows:
            reference.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert distance(p, q) < FLOAT16
    assert scaler.get_scale() == 2.0**11
    assert amp_graph.scale_of(model).get_scale() == 1.0, "the graphs' own scale is off"


def test_a_scaler_made_after_the_first_step_takes_over() -> None:
    plain, model = twins(Mlp(), scaled(2.0**8))
    optimizer = SGD(model.parameters(), lr=0.0)
    loss_of(plain).backward()
    loss_of(model).backward()
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for _ in range(2):  # the scaler shows itself at its first step
        model.zero_grad()
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert_same_gradients(model, plain)
    assert amp_graph.scale_of(model).get_scale() == 1.0


def test_graphs_scale_again_once_no_scaler_steps() -> None:
    model = Mlp()
    optimizer = SGD(model.parameters(), lr=0.0)
    amp_graph.convert(model, optimizer, policy=scaled(2.0**8))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(model)).backward()
    scaler.step(optimizer)
    assert amp_graph.scale_of(model).get_scale() == 1.0
    for _ in range(2):  # it is known to be gone at its first step
        loss_of(model).backward()
        optimizer.step()
    assert amp_graph.scale_of(model).get_scale() == 2.0**8


@pytest.mark.parametrize("make", SCALERS, ids=["torch", "ours"])
def test_a_disabled_scaler_is_no_scaler(make: Any) -> None:
    plain = Mlp()
    model = copy.deepcopy(plain)
    scaler = make(enabled=False)
    optimizer = SGD(model.parameters(), lr=0.1)
    amp_graph.convert(model, optimizer, policy="float16")
    for overflows in (False, True):
        plain.zero_grad()
        model.zero_grad()
        loss_of(plain).backward()
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(optimizer)
        assert_same_gradients(model, plain)
        before = snapshot(model)
        if overflows:
            overflow(model)
        scaler.step(optimizer)
        scaler.update()
        assert same(snapshot(model), before) is overflows
        plain.load_state_dict(model.state_dict())
    assert scaler.get_scale() == 1.0 and scaler.state_dict() == {}
    assert amp_graph.scale_of(model).get_scale() == 2.0**15


def test_ours_is_torch_s_step_by_step() -> None:
    """Two runs of one float32 script that differ in the import; overflows at random."""
    overflows = (torch.rand(40, generator=torch.Generator().manual_seed(5)) < 0.3).tolist()
    runs = []
    for make in SCALERS:
        torch.manual_seed(0)
        model = Mlp()
        optimizer = AdamW(model.parameters(), lr=0.01)
        scaler = make(init_scale=2.0**10, growth_interval=3, growth_factor=4.0)
        states = []
        for bad in overflows:
            optimizer.zero_grad()
            scaler.scale(loss_of(model)).backward()
            if bad:
                overflow(model)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            states.append(scaler.get_scale())
            if len(states) == 20:
                scaler.set_growth_factor(3.0)
                scaler.set_backoff_factor(0.25)
                scaler.set_growth_interval(2)
        runs.append((states, snapshot(model, optimizer)))
    assert runs[0][0] == runs[1][0]
    assert same(runs[0][1], runs[1][1])


def test_scale_takes_what_torch_s_takes() -> None:
    scaler = GradScaler(init_scale=4.0)
    one, half = torch.ones(2), torch.ones(2, dtype=torch.float16)
    assert torch.equal(scaler.scale(one), one * 4)
    assert isinstance(scaler.scale([one, half]), list)
    assert GradScaler().scale(half.sum()).item() == 2.0**17  # beyond float16
    first, (second,) = scaler.scale((one, (half,)))
    assert torch.equal(first, one * 4) and second.dtype is torch.float16
    with pytest.raises(AmpGraphError, match="not int"):
        scaler.scale(3)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (2.0, 0.5)
    assert scaler.get_growth_interval() == 2000 and scaler.is_enabled()


def test_update_sets_a_scale_and_checks_its_order() -> None:
    model = Mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = GradScaler(init_scale=4.0)
    with pytest.raises(AmpGraphError, match="before any step"):
        scaler.update()
    scaler.update(8.0)
    assert scaler.get_scale() == 8.0
    scaler.update(torch.tensor(2.0))
    assert scaler.get_scale() == 2.0
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(AmpGraphError, match="unscale_"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(AmpGraphError, match="step"):
        scaler.step(optimizer)
    with pytest.raises(AmpGraphError, match="unscale_"):
        scaler.unscale_(optimizer)
    scaler.update()
    scaler.scale(loss_of(model)).backward()
    scaler.step(optimizer)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_update_never_sets_a_scale_that_is_none(value: float) -> None:
    scaler = GradScaler(init_scale=4.0)
    with pytest.raises(AmpGraphError):
        scaler.update(value)
    assert scaler.get_scale() == 4.0


def test_two_optimizers_and_one_update() -> None:
    models = [Mlp(), Mlp()]
    optimizers = [SGD(m.parameters(), lr=0.1) for m in models]
    scaler = GradScaler(init_scale=4.0)
    for model in models:
        scaler.scale(loss_of(model)).backward()
    overflow(models[1])
    before = snapshot(*models)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    after = snapshot(*models)
    assert not same(after[0], before[0]) and same(after[1], before[1])


def test_optimizers_that_live_for_one_step_have_one_each() -> None:
    model, scaler = Mlp(), GradScaler(init_scale=4.0)
    for _ in range(5):
        scaler.scale(loss_of(model)).backward()
        scaler.step(SGD(model.parameters(), lr=0.1))
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_step_hands_arguments_and_result_through() -> None:
    model = Mlp()
    optimizer = LBFGS(model.parameters())
    scaler = GradScaler(enabled=False)
    assert scaler.step(optimizer, lambda: loss_of(model)).item() == loss_of(model).item()


def test_what_is_no_optimizer_is_not_stepped() -> None:
    with pytest.raises(AmpGraphError, match="GradScaler steps optimizers, not int 5"):
        GradScaler().step(5)
    with pytest.raises(AmpGraphError, match="takes tensors, not str"):
        GradScaler().scale(["text"])


def test_step_takes_no_closure() -> None:
    """Its gradients would be those of the scaled loss (torch's says so for a keyword alone)."""
    model = Mlp()
    optimizer, before = SGD(model.parameters(), lr=0.1), snapshot(model)
    scaler, closure = GradScaler(), lambda: loss_of(model)
    with pytest.raises(AmpGraphError, match="takes no closure"):
        scaler.step(optimizer, closure)
    with pytest.raises(AmpGraphError, match="takes no closure"):
        scaler.step(optimizer, closure=closure)
    assert same(snapshot(model), before)


@pytest.mark.parametrize("many", [True, False])
def test_apex_s_scale_loss(many: bool) -> None:
    plain = Mlp()
    model = copy.deepcopy(plain)
    optimizer = SGD(model.parameters(), lr=0.1)
    amp_graph.convert(model, optimizer, policy="float16")
    loss_of(plain).backward()
    with amp_graph.scale_loss(loss_of(model), [optimizer] if many else optimizer) as scaled_loss:
        scaled_loss.backward()
    assert_same_gradients(model, plain)
    overflow(model)
    before = snapshot(model)
    assert optimizer.step() is False
    assert same(snapshot(model), before)
    wrong: Any = [model]
    with pytest.raises(AmpGraphError, match="takes optimizers"):
        amp_graph.scale_loss(loss_of(model), wrong).__enter__()


def test_the_state_of_a_disabled_scaler_is_taken_by_a_disabled_one() -> None:
    scaler = GradScaler(enabled=False)
    scaler.load_state_dict(torch.amp.GradScaler("cpu", enabled=False).state_dict())
    torch.amp.GradScaler("cpu", enabled=False).load_state_dict(scaler.state_dict())


def test_new_models_do_not_walk_all_objects_for_scalers(start: Any) -> None:
    """As code that wraps a network anew at each step would make happen there (torchdiffeq)."""
    start()
    Mlp()(X)  # the first
    with mock.patch.object(explicit_scalers.gc, "get_objects", side_effect=AssertionError):
        model = Mlp()
        model(X)
        scaler, late = torch.amp.GradScaler("cpu"), Mlp()
        late(X)
    assert amp_graph.is_converted(model) and not amp_graph.is_converted(late)
    del scaler


def test_the_scale_that_a_grad_scaler_stands_in_for_stays_as_it_was() -> None:
    model = Mlp()
    optimizer, scaler = SGD(model.parameters(), lr=0.1), SCALERS[0](init_scale=4.0)
    amp_graph.convert(model, optimizer, policy=scaled(2.0**8, growth_interval=1))
    for _ in range(3):
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert amp_graph.scale_of(model).state_dict()["scale"] == 2.0**8
