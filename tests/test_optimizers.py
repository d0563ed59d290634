"""A skipped step leaves no trace, whatever the optimizer; the optimizer stays what it was."""

from __future__ import annotations

import copy
import gc
import inspect
import math
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from training import Mlp, is_fresh, overflow, same, scaled, snapshot

import amp_graph
from amp_graph import AmpGraphError, StepCounts

SCALED = scaled(2.0**10)  # at 2^16 the first gradients would overflow by themselves
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
NOT_HERE = {"Optimizer", "LBFGS", "SparseAdam"}  # no optimizer; with a closure; sparse only
VARIANTS = [
    pytest.param(kind, {flag: True} if flag else {}, id=f"{name} {flag}".strip())
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and name not in NOT_HERE
    for flag in ("", "foreach", "fused", "maximize")
    if not flag or flag in inspect.signature(kind).parameters
]


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def converted(kind: Any = SGD, **options: Any) -> tuple[nn.Module, Any]:
    model = Mlp(bias=False)
    return amp_graph.convert(model, kind(model.parameters(), **options), policy=SCALED)


def trained(model: nn.Module, *optimizers: Optimizer, overflows: bool = False) -> list[Any]:
    """One step; what each optimizer's step returned."""
    model.zero_grad()
    model(X).square().sum().backward()
    if overflows:
        overflow(model)
    return [optimizer.step() for optimizer in optimizers]


def test_there_are_variants_of_every_optimizer() -> None:
    assert len(VARIANTS) >= 13 + 12 + 4


@pytest.mark.parametrize(("kind", "options"), VARIANTS)
def test_a_skipped_step_leaves_no_trace(kind: Any, options: dict[str, bool]) -> None:
    """Overflow at the first step, in the middle and twice in a row: as if they had not been."""
    model, optimizer = converted(kind, lr=0.01, **options)
    plain = amp_graph.restore(copy.deepcopy(model))
    reference = kind(plain.parameters(), lr=0.01, **options)
    for step, overflows in enumerate([True, False, False, True, True, False]):
        before, has_begun = snapshot(model, optimizer), bool(optimizer.state)
        (stepped,) = trained(model, optimizer, overflows=overflows)
        assert bool(stepped) is not overflows
        if overflows:
            if not has_begun and is_fresh(optimizer.state):
                optimizer.state.clear()
            assert same(snapshot(model, optimizer), before), step
            continue
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            q.grad = p.grad.clone()
        reference.step()
        assert same(snapshot(model, optimizer), snapshot(plain, reference)), step
    assert amp_graph.step_counts(optimizer) == StepCounts(stepped=3, skipped=3)
    assert amp_graph.scale_of(model).get_scale() == 2.0**7


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_a_fused_optimizer_does_not_wait_for_the_answer(kind: Any) -> None:
    model, optimizer = converted(kind, lr=0.01, fused=True)
    trained(model, optimizer)
    for overflows in (False, True):
        (told,) = trained(model, optimizer, overflows=overflows)
        assert isinstance(told, Tensor) and told.ndim == 0 and told.dtype is torch.bool
        assert bool(told) is not overflows
        assert not hasattr(optimizer, "found_inf")


def test_other_optimizers_answer_with_a_bool() -> None:
    model, optimizer = converted(SGD, lr=0.01, momentum=0.9)
    assert trained(model, optimizer) == [True]
    assert trained(model, optimizer, overflows=True) == [False]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
def test_every_kind_of_overflow_in_every_parameter(value: float, options: Any) -> None:
    model, optimizer = converted(SGD, lr=0.01, momentum=0.9, **options)
    trained(model, optimizer)
    for i, parameter in enumerate(model.parameters()):
        for position in (0, -1):
            before = snapshot(model, optimizer)
            model.zero_grad()
            model(X).square().sum().backward()
            parameter.grad.view(-1)[position] = value
            assert not optimizer.step(), i
            assert same(snapshot(model, optimizer), before)


def test_it_is_the_optimizer_it_was() -> None:
    model = Mlp()
    optimizer = AdamW(model.parameters(), lr=0.5, weight_decay=0.25)
    groups = optimizer.param_groups
    assert amp_graph.convert(model, optimizer, policy=SCALED) == (model, optimizer)
    assert type(optimizer) is AdamW and optimizer.param_groups is groups
    assert optimizer.defaults["weight_decay"] == 0.25
    _, many = amp_graph.convert(Mlp(), [], policy=SCALED)
    assert many == []


def test_add_param_group_is_guarded_too() -> None:
    model = Mlp()
    optimizer = SGD(model.first.parameters(), lr=0.1)
    amp_graph.convert(model, optimizer, policy=SCALED)
    assert trained(model, optimizer) == [True]
    optimizer.add_param_group({"params": list(model.second.parameters()), "lr": 0.2})
    before = snapshot(model)
    model.zero_grad()
    model(X).sum().backward()
    model.second.bias.grad[0] = math.nan
    assert optimizer.step() is False
    assert same(snapshot(model), before)
    assert trained(model, optimizer) == [True]
    assert not same(snapshot(model), before)


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    for wrong in (SGD(Mlp().parameters(), lr=0.1), "SGD", [None]):
        model = Mlp()
        with pytest.raises(AmpGraphError):
            amp_graph.convert(model, wrong, policy=SCALED)  # type: ignore[call-overload]
        assert not amp_graph.is_converted(model)


@pytest.mark.parametrize("before", [True, False], ids=["made before", "made after"])
def test_a_scheduler_advances_unless_the_user_looks_at_the_answer(before: bool) -> None:
    model = Mlp()
    optimizer = SGD(model.parameters(), lr=1.0)
    if before:
        every, asked = (StepLR(optimizer, 1, 0.5), ReduceLROnPlateau(optimizer))
    amp_graph.convert(model, optimizer, policy=SCALED)
    if not before:
        every, asked = (StepLR(optimizer, 1, 0.5), ReduceLROnPlateau(optimizer))
    rates = []
    for overflows in (False, True, False):
        if trained(model, optimizer, overflows=overflows)[0]:
            every.step()
        asked.step(1.0)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.5, 0.5, 0.25]


@pytest.mark.filterwarnings("error")
def test_a_scheduler_after_a_skipped_first_step_does_not_warn() -> None:
    model, optimizer = converted(SGD, lr=1.0)
    scheduler = StepLR(optimizer, 1, 0.5)
    assert trained(model, optimizer, overflows=True) == [False]
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_hooks_of_the_user_run_when_it_steps_as_under_a_grad_scaler() -> None:
    model, optimizer = converted(SGD, lr=0.1)
    seen: list[tuple[str, Any]] = []
    optimizer.register_step_pre_hook(lambda o, a, k: seen.append(("pre", o)))
    optimizer.register_step_post_hook(lambda o, a, k: seen.append(("post", o)))
    for overflows in (False, True):
        seen.clear()
        trained(model, optimizer, overflows=overflows)
        assert [name for name, _ in seen] == ([] if overflows else ["pre", "post"])
        assert all(o is optimizer for _, o in seen)


def test_a_user_s_hook_that_clips_sees_true_gradients_and_cannot_hide_an_overflow() -> None:
    model, optimizer = converted(SGD, lr=0.1)

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    optimizer.register_step_pre_hook(clip)
    before = snapshot(model)
    assert trained(model, optimizer, overflows=True) == [False]
    assert same(snapshot(model), before)


def test_deepcopy_and_pickle_of_an_optimizer() -> None:
    model, optimizer = converted(Adam, lr=0.1)
    trained(model, optimizer)
    trained(model, optimizer, overflows=True)
    twin_model, twin = copy.deepcopy((model, optimizer))
    for other_model, other in ((twin_model, twin), pickle.loads(pickle.dumps((model, optimizer)))):
        assert type(other) is Adam
        assert same(snapshot(other_model, other), snapshot(model, optimizer))
        before = snapshot(model, optimizer)
        other_model(X).sum().backward()
        other.step()
        assert not same(snapshot(other_model), snapshot(model))
        assert same(snapshot(model, optimizer), before)
    before = snapshot(twin_model, twin)
    twin_model(X).sum().backward()
    overflow(twin_model)
    twin.step()
    assert same(snapshot(twin_model, twin), before)


def test_restore_ends_guarding() -> None:
    model, optimizer = converted(SGD, lr=0.1)
    trained(model, optimizer)
    amp_graph.restore(model)
    trained(model, optimizer, overflows=True)
    assert not all(p.isfinite().all() for p in model.parameters())
    assert "amp_graph" not in optimizer.state_dict()


def test_bfloat16_has_no_scale_and_no_guard() -> None:
    model = Mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    amp_graph.convert(model, optimizer, policy="bfloat16")
    assert amp_graph.scale_of(model) is None
    trained(model, optimizer)
    assert "amp_graph" not in optimizer.state_dict()
    trained(model, optimizer, overflows=True)
    assert not all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("how", [{}, {"nesterov": True, "weight_decay": 0.1}, {"dampening": 0.2}])
def test_momentum_of_a_parameter_whose_first_step_is_skipped(how: Any) -> None:
    """A fused SGD leaves it as its memory was, and goes on from it."""
    model = Mlp(width=1024)
    first, second = model.first.weight, model.second.weight
    optimizer = SGD([second], lr=0.1, momentum=0.9, fused=True, **how)
    amp_graph.convert(model, optimizer, policy=SCALED)
    reference = copy.deepcopy(amp_graph.restore(copy.deepcopy(model)))
    plain = SGD([reference.second.weight], lr=0.1, momentum=0.9, fused=True, **how)
    for step, overflows in enumerate([False, True, False, False]):
        if step == 1:
            optimizer.add_param_group({"params": [first]})
            plain.add_param_group({"params": [reference.first.weight]})
        model.zero_grad()
        model(X).square().mean().backward()
        if overflows:
            overflow(model)
        dirty = [torch.full_like(p, 1e30) for p in (first, second) for _ in range(50)]
        del dirty  # what memory that is taken anew now holds
        assert bool(optimizer.step()) is not overflows
        if not overflows:
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                assert p.grad is not None
                q.grad = p.grad.clone()
            plain.step()
    assert same(list(model.parameters()), list(reference.parameters()))


class Stop(Exception):
    pass


def failed_first_step() -> weakref.ref[Optimizer]:
    """Of an optimizer that was found in it, by a closure that fails half-way."""
    model = amp_graph.convert(Mlp(), policy=SCALED)
    optimizer = LBFGS(model.parameters())
    calls = iter(range(2))

    def closure() -> Tensor:
        if next(calls) == 1:
            raise Stop
        optimizer.zero_grad()
        loss: Tensor = model(X).square().mean()
        loss.backward()
        return loss

    with pytest.raises(Stop):
        optimizer.step(closure)
    return weakref.ref(optimizer)


def test_a_step_that_raised_keeps_nothing_alive() -> None:
    optimizer = failed_first_step()
    gc.collect()
    assert optimizer() is None
