"""Optimizers as people use them: closures, several of them, unannounced."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from training import FLOAT16, Mlp, X, Y, assert_skips, distance, overflow, same, scaled, snapshot

import amp_graph
from amp_graph import ConversionWarning, StepCounts

SCALED = scaled(2.0**10)


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def closure_of(
    model: nn.Module, optimizer: Optimizer, overflows_at: int = -1
) -> tuple[Callable[[], Tensor], list[float]]:
    """A closure whose gradients overflow at one of its evaluations, and the losses it returned."""
    losses: list[float] = []

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = (model(X) - Y).square().mean()
        loss.backward()
        if len(losses) == overflows_at:
            overflow(model)
        losses.append(loss.item())
        return loss

    return closure, losses


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_a_closure_is_evaluated_once_and_its_loss_returned(kind: Any) -> None:
    model = Mlp()
    optimizer = kind(model.parameters(), lr=0.1)
    amp_graph.convert(model, optimizer, policy=SCALED)
    for overflows_at in (-1, 0, -1):
        closure, losses = closure_of(model, optimizer, overflows_at)
        before = snapshot(model, optimizer)
        assert optimizer.step(closure).item() == losses[0] and len(losses) == 1
        assert same(snapshot(model, optimizer), before) is (overflows_at == 0)
    assert amp_graph.step_counts(optimizer) == StepCounts(2, 1)


@pytest.mark.parametrize("by", ["position", "name"])
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_takes_float32_s_steps(search: str | None, by: str) -> None:
    plain = Mlp()
    model = copy.deepcopy(plain)
    options = {"lr": 0.5, "max_iter": 4, "line_search_fn": search}
    reference, optimizer = (
        LBFGS(plain.parameters(), **options),
        LBFGS(model.parameters(), **options),
    )
    amp_graph.convert(model, optimizer, policy=SCALED)
    first = [p.detach().clone() for p in plain.parameters()]
    for _ in range(2):
        reference.step(closure_of(plain, reference)[0])
        closure, losses = closure_of(model, optimizer)
        loss = optimizer.step(closure) if by == "position" else optimizer.step(closure=closure)
        assert loss.item() == losses[0] and len(losses) > 2
    for p, q, start in zip(model.parameters(), plain.parameters(), first, strict=True):
        # Curvature is estimated from differences of gradients, ten times smaller than they are.
        assert distance(p - start, q - start) < 10 * FLOAT16
    assert losses[-1] < 0.9 * (Y.square().mean().item())


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("overflows_at", [0, 1, 3])
def test_lbfgs_puts_everything_back(search: str | None, overflows_at: int) -> None:
    model = Mlp()
    optimizer = LBFGS(model.parameters(), lr=0.5, max_iter=6, line_search_fn=search)
    amp_graph.convert(model, optimizer, policy=SCALED)
    for expected in (StepCounts(0, 1), StepCounts(1, 2)):  # at the first step, and with state
        before = snapshot(model, optimizer)
        closure, losses = closure_of(model, optimizer, overflows_at)
        assert math.isfinite(optimizer.step(closure).item())
        assert len(losses) == overflows_at + 1, "nothing is evaluated after an overflow"
        assert same(snapshot(model, optimizer), before)
        assert amp_graph.step_counts(optimizer) == expected
        optimizer.step(closure_of(model, optimizer)[0])
        assert not same(snapshot(model), before[:1])


def test_two_optimizers_of_one_model_skip_for_their_own_parameters() -> None:
    model = Mlp()
    first = SGD(model.first.parameters(), lr=0.1, momentum=0.9)
    second = AdamW(model.second.parameters(), lr=0.1, fused=True)
    amp_graph.convert(model, [first, second], policy=SCALED)
    scale = amp_graph.scale_of(model)
    for bad, counts in [((), (1, 0, 1, 0)), ((1,), (2, 0, 1, 1)), ((0,), (2, 1, 2, 1))]:
        before = snapshot(model.first, first), snapshot(model.second, second)
        model.zero_grad()
        model(X).square().sum().backward()
        for i in bad:
            overflow((model.first, model.second)[i])
        told = [bool(first.step()), bool(second.step())]
        assert told == [0 not in bad, 1 not in bad]
        after = snapshot(model.first, first), snapshot(model.second, second)
        assert [same(a, b) for a, b in zip(after, before, strict=True)] == [not t for t in told]
        a, b = amp_graph.step_counts(first), amp_graph.step_counts(second)
        assert (a.stepped, a.skipped, b.stepped, b.skipped) == counts
    assert scale.get_scale() == 2.0**8, "one backoff for each round with an overflow in it"


def test_an_overflow_for_both_optimizers_is_one_backoff() -> None:
    model = Mlp()
    optimizers = [SGD(m.parameters(), lr=0.1) for m in (model.first, model.second)]
    amp_graph.convert(model, optimizers, policy=SCALED)
    for expected in (2.0**9, 2.0**8):
        model.zero_grad()
        (model(X) * math.inf).sum().backward()
        assert [o.step() for o in optimizers] == [False, False]
        assert amp_graph.scale_of(model).get_scale() == expected
    assert amp_graph.scale_of(model).skips == 2, "rounds"


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
def test_one_optimizer_over_two_models(options: Any) -> None:
    models = [Mlp(), Mlp(outputs=4)]
    optimizer = SGD([p for m in models for p in m.parameters()], lr=0.1, momentum=0.9, **options)
    for model in models:
        amp_graph.convert(model, optimizer, policy=SCALED)
    scales = [amp_graph.scale_of(model) for model in models]
    for bad, expected in [(None, [10, 10]), (0, [9, 10]), (1, [9, 9]), (1, [9, 8]), (None, [9, 8])]:
        optimizer.zero_grad()
        models[0](models[1](X)).square().mean().backward()
        before = snapshot(*models, optimizer)
        if bad is not None:
            overflow(models[bad])
        assert bool(optimizer.step()) is (bad is None)
        assert same(snapshot(*models, optimizer), before) is (bad is not None)
        assert [math.log2(s.get_scale()) for s in scales] == expected
    assert len(optimizer.state_dict()["amp_graph"]["scales"]) == 2
    assert amp_graph.step_counts(optimizer) == StepCounts(2, 3)


@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_an_optimizer_nobody_mentioned_is_found(options: Any, made: str) -> None:
    model = Mlp()
    if made == "before":
        optimizer = Adam(model.parameters(), lr=0.1, **options)
    amp_graph.convert(model, policy=SCALED)
    if made == "after":
        optimizer = Adam(model.parameters(), lr=0.1, **options)
    assert_skips(model, optimizer, (True, False, True, False))
    assert amp_graph.step_counts(optimizer) == StepCounts(2, 2)
    assert amp_graph.scale_of(model).get_scale() == 2.0**8


@pytest.mark.usefixtures("no_other_scales")
def test_an_optimizer_of_another_model_is_left_alone() -> None:
    """If no model has given gradients to what it does not own."""
    model = amp_graph.convert(Mlp(), policy=SCALED)
    model(X).sum().backward()
    plain = Mlp()
    optimizer = SGD(plain.parameters(), lr=0.1)
    plain(X).sum().backward()
    overflow(plain)
    assert optimizer.step() is None
    assert not all(p.isfinite().all() for p in plain.parameters())
    assert "amp_graph" not in optimizer.state_dict()
    assert amp_graph.is_converted(model)  # and lives


def test_nothing_is_kept_alive() -> None:
    model = Mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    amp_graph.convert(model, optimizer, policy=SCALED)
    model(X).sum().backward()
    optimizer.step()
    alive = [weakref.ref(o) for o in (model, optimizer, amp_graph.scale_of(model))]
    del model, optimizer
    torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in alive] == [None, None, None]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "context",
    [
        torch.inference_mode,
        lambda: torch.device("meta"),
        lambda: default_dtype(torch.float64),
        lambda: default_dtype(torch.float16),
    ],
    ids=["inference mode", "meta device", "float64 by default", "float16 by default"],
)
def test_the_context_of_a_conversion_does_not_matter(context: Any) -> None:
    model = Mlp()
    optimizer = AdamW(model.parameters(), fused=True)
    with context():
        amp_graph.convert(model, optimizer, policy=SCALED)
    for overflows in (False, False, True, False):
        optimizer.zero_grad()
        with contextlib.nullcontext() if context is torch.inference_mode else context():
            (model(X) - Y).square().mean().backward()
        if overflows:
            overflow(model)
        optimizer.step()
    assert amp_graph.step_counts(optimizer) == StepCounts(3, 1)
    assert amp_graph.scale_of(model).get_scale() == 2.0**9


def test_a_step_that_raised_leaves_later_ones_watched() -> None:
    model = Mlp()
    optimizer = SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    step = optimizer.step  # kept from before, so that no guard can stand before it
    amp_graph.convert(model, policy=SCALED)
    model(X).sum().backward()
    step()

    def raising() -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        step(raising)
    overflow(model)
    before = snapshot(model)
    step()
    assert same(snapshot(model), before)
    assert amp_graph.step_counts(optimizer) == StepCounts(stepped=1, skipped=1)


def test_a_step_returns_what_it_always_did_once_the_model_is_restored() -> None:
    model = Mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    amp_graph.convert(model, optimizer, policy=SCALED)
    with pytest.warns(ConversionWarning, match="converted already"):
        amp_graph.convert(model, optimizer, policy=SCALED)
    model(X).sum().backward()
    assert optimizer.step() is True
    amp_graph.restore(model)
    assert optimizer.step() is None


@pytest.mark.parametrize("scheduler_first", [True, False])
@pytest.mark.filterwarnings("error:Detected call of")
def test_a_scheduler_does_not_complain_of_a_step_that_is_skipped(scheduler_first: bool) -> None:
    model = nn.Linear(4, 4)
    optimizer = SGD(model.parameters(), lr=0.1)
    make = functools.partial(StepLR, optimizer, 1)
    scheduler = make() if scheduler_first else None
    amp_graph.convert(model, optimizer, policy=scaled(2.0**20))
    scheduler = scheduler or make()
    (1e9 * model(torch.ones(2, 4))).sum().backward()
    assert optimizer.step() is False
    scheduler.step()


def test_an_optimizer_of_two_models_tells_until_both_are_restored() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = SGD([*one.parameters(), *other.parameters()], lr=0.1)
    for model in (one, other):
        amp_graph.convert(model, optimizer, policy="bfloat16")
    amp_graph.restore(one)
    assert optimizer.step() is True
    amp_graph.restore(other)
    assert optimizer.step() is None


def test_optimizers_made_for_one_step_are_not_taken_for_one_another() -> None:
    """An id may be that of the one before; the scale goes down once for all of a round."""
    model = amp_graph.convert(Mlp(), policy=SCALED)
    before = amp_graph.scale_of(model).get_scale()
    model(X).sum().backward()
    overflow(model)
    for p in model.parameters():
        SGD([p], lr=0.1).step()
    assert amp_graph.scale_of(model).get_scale() == before / 2
