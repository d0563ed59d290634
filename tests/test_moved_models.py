"""Models that are moved after they were converted, or copied to where they run."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from training import overflow

import amp_graph
from amp_graph import ConversionWarning, Policy
from amp_graph.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def moved(model: nn.Module) -> nn.Module:
    """From the meta device to the CPU, with numbers of its own."""
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def float16_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands for a GPU: the default there is float16, and bfloat16 elsewhere."""
    monkeypatch.setattr("amp_graph.policy.FLOAT16_DEVICES", frozenset({"cpu"}))


@pytest.mark.usefixtures("float16_on_cpu")
@pytest.mark.parametrize("policy", [None, Policy(), Policy(loss_scale=2.0**16)])
def test_a_model_that_moves_to_where_float16_is_the_default_is_scaled(policy: Any) -> None:
    model = amp_graph.convert(net().to("meta"), policy=policy)
    scaled_before = amp_graph.scale_of(model) is not None
    assert scaled_before is (policy is not None and policy.loss_scale != "dynamic")
    plain = amp_graph.restore(copy.deepcopy(moved(model)))
    x = torch.randn(4, 8)
    for each in (plain, model):
        (each(x).square().mean() * 1e-7).backward()
    assert [plan.dtype for plan in amp_graph.plans(model)] == [torch.float16]
    assert amp_graph.scale_of(model) is not None
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert q.grad is not None and p.grad is not None
        assert (q.grad - p.grad).norm() <= 0.01 * p.grad.norm()


@pytest.mark.usefixtures("float16_on_cpu")
def test_an_optimizer_given_before_the_move_skips_after_it() -> None:
    model = net().to("meta")
    optimizer = SGD(model.parameters(), lr=0.1)
    amp_graph.convert(model, optimizer)
    moved(model)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    x = torch.randn(4, 8)
    model(x).square().mean().backward()
    assert optimizer.step() is True
    optimizer.zero_grad()
    model(x).square().mean().backward()
    overflow(model)
    assert optimizer.step() is False
    assert "amp_graph" in optimizer.state_dict()


@pytest.mark.usefixtures("float16_on_cpu")
def test_no_scale_where_none_is_wanted() -> None:
    model = amp_graph.convert(net().to("meta"), policy=Policy(loss_scale=None))
    moved(model)(torch.randn(4, 8)).sum().backward()
    assert amp_graph.scale_of(model) is None


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def replica_of(model: nn.Module, weight: Tensor) -> Any:
    """What `torch.nn.parallel.replicate` makes of a model for another GPU."""
    replica: Any = model._replicate_for_data_parallel()
    replica._parameters, replica.weight = {}, weight
    return replica


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_copy_by_data_parallel_runs_on_its_own_parameters(dtype: str) -> None:
    model = amp_graph.convert(Scaled(), policy=dtype)
    weight = (torch.eye(4) * (7 + 2**-12)).requires_grad_()
    x = torch.ones(2, 4)
    with pytest.warns(ConversionWarning, match="runs under autocast: copied by nn.DataParallel"):
        replica = replica_of(model, weight)
    result = replica(x)
    assert result.dtype is torch.float32
    assert torch.equal(result, 7 * x), "in low precision, of which 7 + 2**-12 is 7"
    result.sum().backward()
    assert weight.grad is not None and weight.grad.dtype is torch.float32
    again = replica_of(model, torch.eye(4))  # and says nothing more
    assert torch.equal(again(x), x)
    assert torch.equal(model(x), x)
    assert any("DataParallel" in (plan.otherwise or "") for plan in amp_graph.plans(model))


def test_a_copy_whose_gradients_are_looked_at_runs_in_float32() -> None:
    model, weight = amp_graph.convert(Scaled(), policy="bfloat16"), torch.eye(4) * (7 + 2**-12)
    model.register_full_backward_hook(lambda *_: None)
    with pytest.warns(ConversionWarning, match="hooks of modules would see gradients"):
        replica = replica_of(model, weight)
    assert torch.equal(replica(torch.ones(2, 4)), (7 + 2**-12) * torch.ones(2, 4))


def test_such_a_copy_dies_with_its_call() -> None:
    model = amp_graph.convert(Scaled(), policy="bfloat16")
    with pytest.warns(ConversionWarning):
        replica = replica_of(model, torch.eye(4))
    replica(torch.ones(2, 4))
    gc.disable()
    try:
        alive = weakref.ref(replica)
        del replica
        assert alive() is None, "its parameters are copies on a GPU, which no collector waits for"
    finally:
        gc.enable()


def test_a_copied_model_replicates_itself_and_a_pickled_one_as_plain() -> None:
    model = amp_graph.convert(Scaled(), policy="bfloat16")
    twin: Any = copy.deepcopy(model)
    twin.name = "twin"
    with pytest.warns(ConversionWarning):
        replica = replica_of(twin, torch.eye(4))
    assert replica.name == "twin" and not amp_graph.is_converted(replica)
    assert amp_graph.is_converted(twin) and amp_graph.is_converted(model)
    loaded = pickle.loads(pickle.dumps(model))
    assert not amp_graph.is_converted(loaded)
    assert torch.equal(loaded(torch.ones(2, 4)), torch.ones(2, 4))


def test_a_scale_that_is_loaded_before_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> tuple[list[nn.Module], SGD]:
        monkeypatch.setattr("amp_graph.policy.FLOAT16_DEVICES", frozenset())
        models = [net(), net()]
        optimizer = SGD([p for m in models for p in m.parameters()], lr=0.1)
        for model in models:
            amp_graph.convert(model, optimizer)
        monkeypatch.setattr("amp_graph.policy.FLOAT16_DEVICES", frozenset({"cpu"}))
        return models, optimizer

    def train(models: list[nn.Module], optimizer: SGD, overflows: int) -> None:
        for model in models:
            model(torch.ones(2, 8)).mean().mul(1e-3).backward()
        overflow(models[overflows])
        optimizer.step()

    models, optimizer = made()
    train(models, optimizer, overflows=1)
    saved = copy.deepcopy(optimizer.state_dict())
    again, resumed = made()
    resumed.load_state_dict(saved)
    assert resumed.state_dict()["amp_graph"] == saved["amp_graph"]
    again[0](torch.ones(2, 8))
    assert resumed.state_dict()["amp_graph"] == saved["amp_graph"]
    again[1](torch.ones(2, 8))
    assert [amp_graph.scale_of(m).get_scale() for m in again] == [2.0**16, 2.0**15]
    assert resumed.state_dict()["amp_graph"] == saved["amp_graph"]
    assert amp_graph.step_counts(resumed) == amp_graph.step_counts(optimizer)


def test_a_foreign_scale_that_was_loaded_before_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    amp_graph.convert(model, optimizer)
    state = optimizer.state_dict()
    state["amp_graph"] = {"scales": ["foreign"], "steps": 1, "skipped": 2}
    with pytest.raises(CheckpointError, match="damaged or foreign"):
        optimizer.load_state_dict(state)
    state["amp_graph"]["skipped"] = 0
    optimizer.load_state_dict(state)
    monkeypatch.setattr("amp_graph.policy.FLOAT16_DEVICES", frozenset({"cpu"}))
    with pytest.raises(CheckpointError, match="not the state of a loss scale"):
        model(torch.ones(2, 8))
