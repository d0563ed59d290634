"""Models that turn recording by autograd off and on: every gradient is that of the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import assert_same_gradients, distance, twins
from two_layers import BFLOAT16, POLICIES, Two, X

import amp_graph
from amp_graph import Policy

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Statistics(Two):
    """The first to read `h` in float32 is a statistic that nobody differentiates."""

    mode: Callable[[], AbstractContextManager[Any]] = torch.no_grad

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with self.mode():
            size = h.exp().mean()
        return h.exp() / size.clone() + self.b(h)


class InInferenceMode(Statistics):
    mode = torch.inference_mode


class LowFirstUnrecorded(Two):
    """The first to read `h` in low precision is a product that nobody differentiates."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).exp()
        with torch.no_grad():
            target = self.b(h)
        return self.b(h) - 0.5 * target


class InputFirstUnrecorded(Two):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.b(x)
        return self.a(x) * target


class Nested(Two):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.a(x)
            with torch.enable_grad():
                y = self.b(x).exp()
            z = y.mean() + h
        return y * z


class StraightThrough(Two):
    """As in vector quantisation, but smooth: `detach` and `.data` in one sum."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        other = h.data.tanh()
        return self.b(h + (other - h).detach()) * h.data.abs().mean()


class StateMadeUnrecorded(Two):
    """Memory from `no_grad` that is written to while autograd records, and first read without."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            state = x * 2
        state[:2] = self.a(x)[:2]
        with torch.no_grad():
            size = self.b(state).exp().mean() + state.exp().mean()
        return self.b(state).exp() / size + state.exp()


class AsksForGradient(Two):
    """A value that is made differentiable, of which nothing differentiable leaves."""

    def forward(self, x: Tensor) -> Tensor:
        start = torch.zeros_like(x).requires_grad_()
        return self.b(self.a(x) + start.exp().detach())


MODELS = [
    StateMadeUnrecorded,
    Statistics,
    InInferenceMode,
    LowFirstUnrecorded,
    InputFirstUnrecorded,
    Nested,
    StraightThrough,
]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_those_of_the_plain_model(kind: type[nn.Module], policy: Policy) -> None:
    plain, model = twins(kind(), policy)
    inputs = []
    for each in (plain, model):
        x = X.clone().requires_grad_()
        each(x).square().mean().backward()
        inputs.append(x.grad)
        assert torch.is_grad_enabled()
    assert_same_gradients(model, plain, BFLOAT16)
    assert (inputs[0] is None) == (inputs[1] is None)
    if inputs[0] is not None:
        assert distance(inputs[1], inputs[0]) <= BFLOAT16
    assert all(plan.low for plan in amp_graph.plans(model))


def test_a_value_that_asks_for_a_gradient_in_evaluation() -> None:
    """As MRA's attention does, of which no gradient is taken."""
    plain, model = twins(AsksForGradient(), Policy("bfloat16"))
    with torch.no_grad():
        assert distance(model(X), plain(X)) <= BFLOAT16
    assert not any(plan.fallback for plan in amp_graph.plans(model))


class CheckpointThatRecords(Two):
    """Its body is for the mode at its call, whatever the mode of the model's."""

    def block(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            size = h.exp().mean()
        return self.b(h.exp() / size)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return checkpoint(self.block, x, use_reentrant=False)


class RecordsInCheckpoint(Two):
    def block(self, x: Tensor) -> Tensor:
        size = self.a(x).mean()
        with torch.enable_grad():
            return self.a(x) * size

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = checkpoint(self.block, x, use_reentrant=False)
        return y + self.b(x) * y


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize(
    ("kind", "around"),
    [
        (CheckpointThatRecords, torch.no_grad),
        (CheckpointThatRecords, torch.enable_grad),
        (RecordsInCheckpoint, torch.enable_grad),
    ],
)
def test_bodies_of_checkpoints(around: Any, kind: type[nn.Module], policy: Policy) -> None:
    plain, model = twins(kind(), policy)
    for each in (plain, model):
        with around():
            y = each(X)
        y.square().mean().backward()
    assert_same_gradients(model, plain, BFLOAT16)


def test_inspection_of_casts_where_recording_is_off(tmp_path: Path) -> None:
    model = amp_graph.convert(Statistics(), policy="bfloat16")
    model(X)
    assert "linear" in str(amp_graph.explain(model))
    amp_graph.dump(model, tmp_path)
    lines = (tmp_path / "graph0.after.txt").read_text().splitlines()
    switches = [line for line in lines if "= _set_grad_enabled(" in line]
    assert len(switches) == 4  # the model's own, and two for a cast
    assert sum("has the cast recorded" in line for line in switches) == 2
    assert not amp_graph.find_nonfinite(model, X)
    amp_graph.compare(model, X)


class Force(nn.Module):
    """A gradient is taken inside, whatever the mode of the call: energies and forces, flows."""

    def __init__(self, of_weights: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.of_weights = nn.Linear(8, 8), of_weights

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            energy = torch.tanh(self.layer(x)).square().sum()
        source = self.layer.weight if self.of_weights else x
        return torch.autograd.grad(energy, source)[0]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("of_weights", [False, True], ids=["of the input", "of the weights"])
@pytest.mark.parametrize("around", [torch.no_grad, torch.enable_grad])
def test_a_gradient_taken_inside(around: Any, of_weights: bool, policy: Policy) -> None:
    plain, model = twins(Force(of_weights), policy)
    with around():
        assert distance(model(X), plain(X)) <= BFLOAT16
        assert torch.is_grad_enabled() == (around is torch.enable_grad)


class ClampsItsInput(Two):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x.clamp_(-0.5, 0.5)
        return self.a(x)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_an_input_that_requires_a_gradient_is_written_unrecorded(policy: Policy) -> None:
    plain, model = twins(ClampsItsInput(), policy)
    inputs = [X.clone().requires_grad_() for _ in range(2)]
    for each, x in zip((plain, model), inputs, strict=True):
        each(x).square().mean().backward()
        assert x._version == 1
    assert torch.equal(*inputs)
    assert distance(inputs[1].grad, inputs[0].grad) <= BFLOAT16
    assert amp_graph.plans(model)[0].fallback is None


class FailsUnrecorded(Two):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            h = h.index_select(0, other)
        return self.b(h)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo 2.11 ends graphs at such a request")
@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_a_request_for_gradients_where_nothing_is_recorded(around: Any) -> None:
    """What transformers' `enable_input_require_grads` does to embeddings, in an evaluation."""
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plain[0].requires_grad_(False).register_forward_hook(lambda m, i, o: o.requires_grad_(True))
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    with around():
        expected, result = plain(X), model(X)
    assert distance(result, expected) <= BFLOAT16
    assert not result.requires_grad
    plans = amp_graph.plans(model)
    assert not any(plan.fallback for plan in plans) and any(plan.low for plan in plans)


def test_an_error_leaves_the_mode_as_it_was() -> None:
    model = amp_graph.convert(FailsUnrecorded(), policy="bfloat16")
    model(X, torch.tensor([0, 3]))
    for mode in (nullcontext(), torch.no_grad()):
        with mode:
            before = torch.is_grad_enabled()
            with pytest.raises(IndexError):
                model(X, torch.tensor([0, 9]))
            assert torch.is_grad_enabled() == before


def test_a_fallback_in_the_first_run_keeps_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emitted graph fails where recording is off; the captured one runs as it was called."""
    plain = Statistics()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    calls = []

    def failing(*args: Any) -> Tensor:
        calls.append(torch.is_grad_enabled())
        raise RuntimeError("planted")

    planted = {torch.ops.aten.mean.default: failing}
    monkeypatch.setattr("amp_graph.backend.eager.binding", planted.get)
    with pytest.warns(amp_graph.ConversionWarning, match="planted"):
        y = model(X)
    assert calls == [False] and torch.is_grad_enabled()
    y.square().mean().backward()
    plain(X).square().mean().backward()
    assert_same_gradients(model, plain, 1e-5)
