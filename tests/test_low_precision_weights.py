"""Low-precision weights are never stale, however a parameter was changed.

After each kind of change the model must compute what a model freshly converted with the same
parameters computes, to the bit.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel
from training import FLOAT16, Mlp, X, assert_same_gradients, distance, twins
from weight_changes import CHANGES, SCALED, assert_seen, now

import amp_graph
from amp_graph.weights import store

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("mode", ["training", "eval", "inference"])
def test_is_never_stale(change: Callable[[nn.Module], Any], mode: str) -> None:
    model = amp_graph.convert(Mlp(), policy=SCALED)
    around = {"training": torch.enable_grad, "eval": torch.no_grad}.get(mode, torch.inference_mode)
    model.train(mode == "training")
    model(X)
    assert_seen(model, change, around)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_gradients_after_a_change(change: Callable[[nn.Module], Any]) -> None:
    _, model = twins(Mlp(), SCALED)
    model(X).square().mean().backward()
    change(model)
    plain = amp_graph.restore(copy.deepcopy(model))
    for each in (plain, model):
        each.zero_grad()
        each(X).square().mean().backward()
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("by", [".data", "copy_", "swap of .data"])
def test_ema_swapped_in_and_out(by: str) -> None:
    model = amp_graph.convert(Mlp(), policy=SCALED)
    live = model(X).detach()
    averages = [p.detach() * 0.5 for p in model.parameters()]
    backup = [p.detach().clone() for p in model.parameters()]

    def put(values: list[Tensor]) -> None:
        for p, value in zip(model.parameters(), values, strict=True):
            if by == "copy_":
                with torch.no_grad():
                    p.copy_(value)
            elif by == ".data":
                p.data.copy_(value)
            else:
                p.data = value

    for _ in range(2):
        put(averages)
        with torch.no_grad():
            assert torch.equal(model(X), now(model))
        put(backup)
        assert torch.equal(model(X).detach(), live)


def test_averaged_model_computes_with_its_own_weights() -> None:
    model = amp_graph.convert(Mlp(), policy=SCALED)
    model(X)
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    for p in model.parameters():
        p.data.mul_(2)
    averaged.update_parameters(model)
    with torch.no_grad():
        assert torch.equal(averaged(X), now(averaged.module))
        assert torch.equal(model(X), now(model))
        assert not torch.equal(averaged(X), model(X))


def test_frozen_then_unfrozen() -> None:
    plain, model = twins(Mlp(), SCALED)
    for frozen in (True, False, True):
        for each in (plain, model):
            each.first.requires_grad_(not frozen)
            optimizer = SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
            each.zero_grad()
            each(X).square().mean().backward()
            assert all((p.grad is None) is frozen for p in each.first.parameters())
            optimizer.step()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert distance(p, q) <= 0.001  # one part in a thousand: lr times float16's error
        assert_same_gradients(model, plain)


def test_all_frozen_but_the_input() -> None:
    found = []
    for each in twins(Mlp().requires_grad_(False)):
        x = X.clone().requires_grad_()
        (each(x).square().mean() * 1e-6).backward()
        found.append(x.grad)
    assert distance(found[1], found[0]) <= FLOAT16


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.table((x * 3).abs().long() % 8))))


PARAMETRIZED: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 2))),
    "spectral_norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 2))),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4))),
    "old weight_norm": lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 2))),
    "old spectral_norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 2))),
    "tied": Tied,
    "one layer twice": lambda: (lambda m: nn.Sequential(m, nn.Tanh(), m))(nn.Linear(4, 4)),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated", "ignore::FutureWarning")
@pytest.mark.parametrize("make", PARAMETRIZED.values(), ids=PARAMETRIZED.keys())
def test_shared_and_parametrized_weights_train(make: Callable[[], nn.Module]) -> None:
    plain = make()
    # deepcopy refuses the old weight_norm; a second one with the same state does as well.
    model = make()
    model.load_state_dict(plain.state_dict())
    amp_graph.convert(model, policy=SCALED)
    steppers = [SGD(m.parameters(), lr=0.02) for m in (plain, model)]
    for _ in range(3):
        for each, optimizer in zip((plain, model), steppers, strict=True):
            optimizer.zero_grad()
            each(X).square().mean().backward()
            optimizer.step()
        assert_same_gradients(model, plain)
        plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        model.eval(), plain.eval()
        assert distance(model(X), plain(X)) <= FLOAT16
        for p in model.parameters():
            p.data.mul_(0.5)
        plain.load_state_dict(model.state_dict())
        assert distance(model(X), plain(X)) <= FLOAT16


def test_a_parametrization_added_later() -> None:
    class Twice(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    model = amp_graph.convert(Mlp(), policy=SCALED)
    before = model(X)
    parametrize.register_parametrization(model.second, "weight", Twice())
    after = model(X)
    bias = model.second.bias.detach()
    torch.testing.assert_close(after - bias, 2 * (before - bias), rtol=1e-3, atol=1e-3)


class Batched(nn.Module):
    """Products of a batch in several dimensions that is not contiguous by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(2, -1, 4).transpose(0, 1)
        return self.other(self.layer(x)[..., :4].transpose(0, 1)) @ torch.eye(2)


def products(run: Callable[[], object]) -> list[str]:
    kernels = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
    with torch.profiler.profile() as found:
        run()
    return [event.name for event in found.events() if event.name in kernels]


@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_weights_are_taken_for_weights(around: Any) -> None:
    """Not expanded and multiplied as a batch, which copies them for each matrix of it."""
    plain = Batched()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    with around():
        model(X), model(X)  # the second call is watched, too
        assert products(lambda: model(X)) == products(lambda: plain(X)) != []


class Looped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        state, total = torch.zeros(x.shape[1], 8), torch.zeros(())
        for step in x:
            state = self.cell(step, state)
            total = total + state.sum()
        return total


def test_gradients_of_a_weight_in_a_loop_are_added_up_in_float32() -> None:
    plain, model = twins(Looped(), "bfloat16")
    x = torch.randn(200, 4, 8, generator=torch.Generator().manual_seed(0))
    for m in (plain, model):
        m(x).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert distance(ours.grad, theirs.grad) < 0.008
    with patch.object(store, "copy_all_", wraps=store.copy_all_) as copied:
        model(x)
    assert [len(call.args[0]) for call in copied.call_args_list] == [4]


def put_together(model: nn.Module, spare: float = 0.0) -> nn.Module:
    """Its parameters in one memory, as cuDNN has those of a recurrent layer."""
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    flat = torch.cat([flat, torch.zeros(int(spare * flat.numel()))])
    place = 0
    for p in model.parameters():
        p.data = flat[place : place + p.numel()].view_as(p)
        place += p.numel()
    return model


def places(tensors: list[Tensor]) -> tuple[int, list[int]]:
    """How many memories they lie in, and where."""
    memories = {t.untyped_storage().data_ptr() for t in tensors}
    return len(memories), [t.storage_offset() for t in tensors]


@pytest.mark.parametrize(("spare", "is_one"), [(0.0, True), (0.05, True), (0.5, False)])
def test_copies_lie_as_the_parameters_do(spare: float, is_one: bool) -> None:
    """Where these make up a memory; a few in a large one are not worth as much again."""
    layer = put_together(nn.LSTM(8, 8, num_layers=2), spare)
    model = amp_graph.convert(layer, policy="bfloat16")
    with patch.object(store, "copy_all_", wraps=store.copy_all_) as copied:
        model(torch.randn(3, 2, 8))
    (written, parameters), _ = copied.call_args
    assert len(written) == len(list(layer.parameters())) == 8
    assert places(parameters)[0] == 1
    assert places(written) == (places(parameters) if is_one else (8, [0] * 8))


def test_training_in_one_memory() -> None:
    apart, together = Mlp(), put_together(Mlp())
    together.load_state_dict(apart.state_dict())
    for model in (apart, together):
        optimizer = SGD(model.parameters(), 0.1)
        amp_graph.convert(model, optimizer, policy=SCALED)
        for _ in range(3):
            model(X).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(apart.parameters(), together.parameters(), strict=True):
        assert torch.equal(p, q)
    *_, last, _ = together.parameters()
    for parameter, is_read in ((next(together.parameters()), False), (last, True)):
        loss = together(X).square().mean()
        with torch.no_grad():
            parameter.add_(1)
        together(X)  # its copy is written anew, and no other copy counts that as a change
        objects = pytest.raises(RuntimeError, match="modified by an inplace operation")
        with objects if is_read else contextlib.nullcontext():
            loss.backward()
