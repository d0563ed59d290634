"""Models of a script that are gone: what is kept of them, and that the report tells of them."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.autopatch.script_models import folded
from amp_graph.autopatch.summary import summary_of
from amp_graph.calls.conversion import found_conversion
from amp_graph.optimizers.guards import _scales

X = torch.ones(2, 8)
COUNTS = ("runs", "operators", "operators_low", "casts", "cast_bytes", "steps_skipped")

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def train(model: nn.Module, *factors: float) -> None:
    """A step for each factor of the loss, of which an infinite one is skipped."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for factor in factors:
        optimizer.zero_grad()
        (model(X).mean() * factor).backward()
        optimizer.step()


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Broken(nn.Sequential):
    """Its own code runs, under autocast."""

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@pytest.mark.parametrize("kind", [nn.Sequential, Broken])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_memory_is_free_at_once(no_collector: None, kind: type[nn.Module], dtype: str) -> None:
    """As that of a plain model is, or a search over many would run out of a GPU's."""
    model = kind(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
    policy = amp_graph.Policy(dtype, loss_scale=amp_graph.LossScale(2.0**8))
    amp_graph.convert(model, optimizer, policy=policy)
    schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        (model(X).sum() * factor).backward()
        optimizer.step()
    conversion = vars(model)["_call_impl"]
    momentum = optimizer.state[model[0].weight]["exp_avg"]
    kept = (model, model[0].weight, optimizer, momentum, conversion, conversion.compiler)
    alive = [weakref.ref(each) for each in kept]
    scale = conversion.scale and weakref.ref(conversion.scale)
    del model, optimizer, schedulers, momentum, conversion, kept
    assert [type(found) for each in alive if (found := each()) is not None] == []
    assert scale is None or scale() is None


def figures(installation) -> list[dict[str, object]]:
    return [summary_of(model).as_json() for model in folded(installation.models.seen)]


def test_copies_that_are_gone_are_one_and_their_scales_are_gone_too(start):
    installation, plain, lasting = start(DTYPE="float16"), nn.Linear(8, 4), nn.Linear(8, 2)
    gc.collect()
    before = len(_scales)
    train(lasting, 1.0)
    for _ in range(4):
        train(copy.deepcopy(plain), 1.0, float("inf"), 1.0)
        gc.collect()
    gc.collect()  # a scale goes with the collection after its model's
    assert len(_scales) == before + 1
    assert len(installation.models.seen) == 3  # one of them since the last was new
    gone, alive = figures(installation)
    assert (gone["alike"], alive["alike"]) == (4, 1)
    assert (gone["runs"], gone["steps_skipped"], gone["loss_scale"]) == (12, 4, 2.0**15)

    single = copy.deepcopy(plain)
    train(single, 1.0, float("inf"), 1.0)
    *_, one = figures(installation)
    assert [gone[name] for name in COUNTS] == [4 * one[name] for name in COUNTS]
    assert {k: v for k, v in gone.items() if k not in (*COUNTS, "alike")} == {
        k: v for k, v in one.items() if k not in (*COUNTS, "alike")
    }


@pytest.mark.parametrize("factors", [(1.0, float("inf")), (float("inf"), 1.0), ()])
def test_of_one_that_is_gone_is_told_what_was_told_before(start, factors):
    installation, model = start(DTYPE="float16"), nn.Linear(8, 4)
    train(model, *factors)
    with torch.no_grad():
        model(X)
    (before,) = figures(installation)
    del model
    gc.collect()
    assert figures(installation) == figures(installation) == [before]


def test_others_that_are_gone_are_told_of_by_themselves(start):
    installation = start()
    nn.Linear(8, 4)(X)
    nn.Linear(8, 3)(X)
    for _ in range(2):
        nn.Linear(8, 4).double()(X.double())
    nn.Linear(8, 4)(X)
    gc.collect()
    told = {(m["alike"], m["converted"]) for m in figures(installation)}
    assert told == {(2, True), (1, True), (2, False)}
    assert len(figures(installation)) == 3


def test_a_backward_pass_that_is_still_to_come_has_its_scale(start):
    start(DTYPE="float16")
    model = nn.Linear(8, 4)
    parameters = [*model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    model(X).sum().backward()
    optimizer.step()
    loss = model(X).sum() * float("inf")
    del model
    gc.collect()
    loss.backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in parameters)


def test_a_child_process_tells_of_its_own_models(start):
    installation, model = start(), nn.Linear(8, 4)
    model(X)
    installation.models.begin_child()
    nn.Linear(8, 3)(X)
    assert len(figures(installation)) == 1
    installation.undo()
    assert not amp_graph.is_converted(model)


def test_the_models_that_are_left_run_their_own_code_after_one_whose_conversion_outlived_it(start):
    """Until Python's collector is at work: seen of compiled ones on torch 2.15 and Python 3.13."""
    installation, gone, left = start(), nn.Linear(8, 4), nn.Linear(8, 4)
    gone(X), left(X)
    conversion = found_conversion(gone)
    del gone
    gc.collect()
    assert conversion is not None and conversion._module() is None
    installation.undo()
    assert not amp_graph.is_converted(left)
    assert start() is not installation
