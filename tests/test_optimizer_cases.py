"""Every optimizer of torch.optim with all options that PyTorch's own tests know, and schedulers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import ConstantLR, ExponentialLR
from torch.testing._internal.common_optimizers import optim_db
from training import Mlp, X, is_fresh, overflow, same, scaled, snapshot

import amp_graph
from amp_graph import StepCounts

# One that grows after each clean step is where it was after as many others.
STEADY = scaled(2.0**8, growth_interval=1)
INDICES = torch.tensor([[0, 1, 2], [3, 1, 0]])
# LBFGS, which steps with a closure, is in test_optimizer_use.py.
INFOS = [info for info in optim_db if not info.step_requires_closure]
KINDS = [
    *(("dense", info) for info in INFOS if not info.only_supports_sparse_grads),
    *(
        ("sparse", info)
        for info in INFOS
        if info.only_supports_sparse_grads or info.supports_sparse
    ),
]


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Bag(nn.Module):
    """A layer behind an embedding, whose gradient may be sparse."""

    def __init__(self, sparse: bool):
        super().__init__()
        self.embedding = nn.Embedding(6, 4, sparse=sparse)
        self.layer = nn.Linear(4, 2)

    def forward(self, indices: Tensor) -> Tensor:
        out: Tensor = self.layer(self.embedding(indices).tanh())
        return out


def options_of(info: Any, sparse: bool) -> Iterator[dict[str, Any]]:
    """By themselves, and for each implementation; `differentiable` is for parameters that are no
    leaves."""
    others = [name for name in ("foreach", "fused") if name in info.supported_impls]
    if sparse and not info.only_supports_sparse_grads:  # dense gradients take more options
        yield from ({}, {"foreach": True})
        return
    for case in info.optim_inputs_func("cpu"):
        yield case.kwargs
        for name in others:
            if name != "foreach" or not isinstance(case.kwargs.get("lr"), Tensor):  # it refuses
                yield {**case.kwargs, name: True}


def made(info: Any, model: Bag, options: dict[str, Any]) -> Any:
    """In two groups, with a rate of its own for one of them."""
    parameters = [p for p in model.parameters() if p.ndim == 2 or info.name != "Muon"]
    groups = [{"params": parameters[:1], "lr": 0.02}, {"params": parameters[1:]}]
    given = groups[:1] if info.only_supports_sparse_grads else groups
    return info.optim_cls(given, **copy.deepcopy(options))


def infinite(gradient: Tensor) -> None:
    (gradient._values() if gradient.is_sparse else gradient).view(-1)[-1] = torch.inf


@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
@pytest.mark.parametrize(("form", "info"), KINDS, ids=[f"{i.name} {form}" for form, i in KINDS])
def test_steps_are_plain_ones_and_skips_leave_no_trace(form: str, info: Any, given: bool) -> None:
    """All options in turn on one model."""
    sparse = form == "sparse"
    model: Any = Bag(sparse)
    twin = Bag(sparse)
    options = [*options_of(info, sparse)]
    optimizers = [made(info, model, each) for each in options]
    amp_graph.convert(model, optimizers if given else [], policy=STEADY)
    for each, optimizer in zip(options, optimizers, strict=True):
        twin.load_state_dict(model.state_dict())
        plain = made(info, twin, each)
        for overflows in (True, False, True, False):
            before, has_begun = snapshot(model, optimizer), plain.state_dict()["state"] != {}
            model.zero_grad()
            model(INDICES).square().sum().backward()
            if overflows:
                infinite(model.embedding.weight.grad)
            told = optimizer.step()
            assert told is None if not given else bool(told) is not overflows
            if not overflows:
                for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                    q.grad = p.grad.clone()
                plain.step()
                assert same(snapshot(model, optimizer), snapshot(twin, plain)), each
                continue
            if not has_begun and is_fresh(optimizer.state):
                optimizer.state.clear()
            assert same(snapshot(model, optimizer), before), each
        assert amp_graph.step_counts(optimizer) == StepCounts(stepped=2, skipped=2)
        scale = amp_graph.scale_of(model)
        assert scale is not None and scale.get_scale() == 2.0**8
        loaded = made(info, twin, each)
        loaded.load_state_dict(optimizer.state_dict())  # by one that is not ours
        assert same(snapshot(loaded), snapshot(optimizer)), each


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "ExponentialLR": lambda o: ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [ConstantLR(o), ExponentialLR(o, 1)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [ConstantLR(o), ExponentialLR(o, 1)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=3),
}


def test_every_scheduler_is_here() -> None:
    known = {
        name for name in lr_scheduler.__all__ if name.endswith(("LR", "Restarts", "Scheduler"))
    }
    # The base class, and one that is told a metric and is in test_optimizers.py.
    assert known - {"LRScheduler", "ReduceLROnPlateau"} == SCHEDULERS.keys() - {"SWALR"}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
def test_schedulers_set_the_rates_that_they_set_a_plain_optimizer(given: bool) -> None:
    """Those made before the conversion and after it; the first step is skipped, as others are."""
    model: Any = Mlp()
    twin = Mlp()
    half, makers = len(SCHEDULERS), [*SCHEDULERS.values()] * 2
    optimizers: list[Any] = [SGD(model.parameters(), lr=0.1, momentum=0.9) for _ in makers]
    pairs = [*zip(makers, optimizers, strict=True)]
    early = [make(optimizer) for make, optimizer in pairs[:half]]
    amp_graph.convert(model, optimizers if given else [], policy=STEADY)
    schedulers = early + [make(optimizer) for make, optimizer in pairs[half:]]
    for (make, optimizer), scheduler in zip(pairs, schedulers, strict=True):
        twin.load_state_dict(model.state_dict())
        plain = SGD(twin.parameters(), lr=0.1, momentum=0.9)
        reference = make(plain)
        for overflows in (True, False, True, False):
            model.zero_grad()
            model(X).square().mean().backward()
            if overflows:
                overflow(model)
            optimizer.step()
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                q.grad = None if overflows else p.grad.clone()
            plain.step()
            scheduler.step()
            reference.step()
            assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
            assert same(snapshot(model, optimizer), snapshot(twin, plain)), type(scheduler)
        assert same(scheduler.get_last_lr(), reference.get_last_lr())
