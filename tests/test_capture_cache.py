"""Models that are called by what was captured of others that are alike."""

from __future__ import annotations

import copy
import gc
import logging
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from alike_models import Branching, Net, X, captured, step
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard

import amp_graph
from amp_graph.calls import capture_cache
from amp_graph.ir import Color

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))


def alone(model: nn.Module, policy: str = "bfloat16", x: Tensor = X) -> list[Tensor]:
    """A step of a model that has its captures for itself."""
    converted = amp_graph.convert(copy.deepcopy(model), policy=policy)
    kept, capture_cache._cache[:] = capture_cache._cache[:], []
    result = step(converted, x)
    capture_cache._cache[:] = kept
    return result


@pytest.mark.parametrize("kind", [Net, Branching])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_that_is_alike_is_not_captured(kind: type[Net], dtype: str) -> None:
    """A copy, one that is new, and one that comes when those are gone."""
    others = [kind() for _ in range(3)]
    expected = [alone(model, dtype) for model in others]
    models = [amp_graph.convert(model, policy=dtype) for model in (kind(), *others[1:])]
    assert captured(lambda: step(models[0])) > 0
    plans = amp_graph.plans(models[0])
    models[0] = copy.deepcopy(models[0])
    models[0].load_state_dict(others[0].state_dict())
    others.clear()
    results: list[list[Tensor]] = []
    while models:
        gc.collect()
        assert captured(lambda: results.append(step(models[0]))) == 0
        assert amp_graph.plans(models.pop(0)) == plans
    for ours, theirs in zip(results, expected, strict=True):
        assert_same(ours, theirs)


def own_forward(model: Net) -> None:
    model.head.forward = types.MethodType(lambda self, x: x * 3, model.head)  # type: ignore


def hooked(model: Net) -> None:
    model.body[0].register_forward_hook(lambda module, args, output: output * 3)


def frozen(model: Net) -> None:
    model.body[0].weight.requires_grad_(False)


def with_a_float32_part(model: Net) -> None:
    amp_graph.convert(model.body, policy=amp_graph.Policy("bfloat16", keep_float32=["*"]))


OTHERS = {
    "a number": lambda: Net(slope=0.3),
    "ties": lambda: Net(tied=True),
    "mode": lambda: Net().eval(),
    "a class": lambda: Branching(),
}


@pytest.mark.parametrize("change", [own_forward, hooked, frozen, with_a_float32_part, *OTHERS])
def test_one_that_is_not_alike_has_its_own(change: Any) -> None:
    step(amp_graph.convert(Net(), policy="bfloat16"))
    other = OTHERS[change]() if change in OTHERS else Net()
    if change not in OTHERS:
        change(other)
    expected = alone(other)
    amp_graph.convert(other, policy="bfloat16")
    results: list[Any] = []
    assert captured(lambda: results.append(step(other))) > 0
    assert_same(results[0], expected)


def test_another_policy_has_its_own() -> None:
    step(amp_graph.convert(Net(), policy="bfloat16"))
    policy = amp_graph.Policy("bfloat16", keep_float32=["head"])
    other = amp_graph.convert(Net(), policy=policy)
    assert captured(lambda: step(other)) > 0
    (plan,) = amp_graph.plans(other)
    assert [f.module_path for name, f in plan.facts.items() if name in plan.low][-1] != "head"


def test_one_that_is_compiled_has_its_own(traced: None) -> None:
    """What Inductor makes knows where the parameters are that it was made for."""
    policy = amp_graph.Policy("bfloat16", compiler="inductor")
    first, other = (amp_graph.convert(Net(), policy=policy) for _ in range(2))
    step(first)
    assert captured(lambda: step(other)) > 0


def test_one_that_follows_a_plan_has_its_own() -> None:
    first = amp_graph.convert(Net(), policy="bfloat16")
    step(first)
    (plan,) = amp_graph.plans(first)
    paint = replace(plan.paints["linear_1"], color=Color.DENY)
    edited = replace(plan, paints={**plan.paints, "linear_1": paint})
    other = amp_graph.convert(Net(), policy="bfloat16", plan=edited)
    assert captured(lambda: step(other)) > 0
    assert "linear_1" in plan.low - amp_graph.plans(other)[0].low
    last = amp_graph.convert(Net(), policy="bfloat16")
    assert captured(lambda: step(last)) == 0
    assert amp_graph.plans(last) == (plan,)


@pytest.fixture
def one_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_one_that_is_sharded_has_its_own(one_rank: None) -> None:
    """What is captured of it may hold its own `forward`."""
    first, other = Net(), Net()
    expected = alone(other)[0]
    first.forward = types.MethodType(lambda self, x: Net.forward(self, x) * 3, first)  # type: ignore
    for model in (first, other):
        amp_graph.convert(fully_shard(model), policy="bfloat16")
    first(X)
    assert torch.equal(other(X), expected)


def test_the_loss_scale_of_each_is_its_own() -> None:
    models = [amp_graph.convert(Net(), policy="float16") for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    for factor in (1.0, float("inf")):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            (model(X).mean() * (factor if model is models[1] else 1.0)).backward()
            optimizer.step()
    assert [amp_graph.scale_of(model).get_scale() for model in models] == [2.0**16, 2.0**15]


def test_what_comes_later_is_captured_for_all() -> None:
    first, other = (amp_graph.convert(Net(), policy="bfloat16") for _ in range(2))
    step(first)
    assert captured(lambda: step(other)) == 0
    assert captured(lambda: step(other, X[:3])) > 0
    assert captured(lambda: step(first, X[:3])) == 0
    first.load_state_dict(other.state_dict())
    for x in (X, X[:3]):
        assert_same(step(first, x), step(other, x))


def test_an_error_of_the_first_call_is_the_users() -> None:
    step(amp_graph.convert(Net(), policy="bfloat16"))
    other = amp_graph.convert(Net(), policy="bfloat16")
    with pytest.raises(Exception, match=r"shapes|size"):
        other(torch.ones(4, 9))
    expected = alone(amp_graph.restore(other))
    assert_same(step(amp_graph.convert(other, policy="bfloat16")), expected)


logger = logging.getLogger("amp_graph_test_alike")


class Logs(Net):
    def forward(self, x: Tensor) -> Tensor:
        logger.info("called")
        return super().forward(x)


def test_what_is_heard_since_is_captured(caplog: pytest.LogCaptureFixture) -> None:
    step(amp_graph.convert(Logs(), policy="bfloat16"))
    other = amp_graph.convert(Logs(), policy="bfloat16")
    with caplog.at_level(logging.INFO, logger.name):
        step(other)
    heard = [record.message for record in caplog.records if record.name == logger.name]
    assert heard == ["called"]


def test_not_more_are_kept_than_so_many() -> None:
    for slope in range(capture_cache.SIZE + 2):
        step(amp_graph.convert(Net(slope / 10 + 0.01), policy="bfloat16"))
    assert len(capture_cache._cache) == capture_cache.SIZE
    last = amp_graph.convert(Net(slope / 10 + 0.01), policy="bfloat16")
    assert captured(lambda: step(last)) == 0


class Counting(Net):
    """It counts its calls, as those that are given to a solver of differential equations."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Wrapper(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def wrapped_step(net: nn.Module) -> list[Tensor]:
    """By a wrapper that is made for it, whose first input needs no gradient, and whose second
    does."""
    wrapper = amp_graph.convert(Wrapper(net), policy="bfloat16")
    return step(wrapper, wrapper(X).detach().requires_grad_())


def test_a_number_that_changes_from_one_to_the_next_is_a_symbol_in_the_end() -> None:
    net = Counting()
    for _ in range(capture_cache.SEVERAL + 1):
        wrapped_step(net)
    results: list[list[Tensor]] = []
    fresh = copy.deepcopy(net)
    assert captured(lambda: results.append(wrapped_step(net))) == 0
    assert captured(lambda: [wrapped_step(copy.deepcopy(net)) for _ in range(8)]) == 0
    assert net.calls == fresh.calls + 2
    capture_cache.clear()
    assert_same(results[0], wrapped_step(fresh))


def test_sizes_of_parameters_do_not_make_symbols_of_numbers() -> None:
    """Those of a search over widths are as they would be alone."""
    for width in range(capture_cache.SEVERAL + 2):
        model = nn.Sequential(nn.Linear(8, width + 1), nn.LeakyReLU(0.1 * (width + 1)))
        expected = alone(model)
        assert_same(step(amp_graph.convert(model, policy="bfloat16")), expected)
        (plan,) = amp_graph.plans(model)
        assert "Sym" not in amp_graph.render(plan)
