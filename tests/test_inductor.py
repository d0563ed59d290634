"""Graphs that Inductor compiles do what the same graphs do operator by operator.

Most tests stop before C++ is made (the fixture `traced`); a few go all the way.
"""

from __future__ import annotations

import copy

import pytest
import torch
from compiled import BFLOAT16, Buffered, assert_close, assert_same_step, pair
from counting import MatmulCounter
from nets import Net
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training import Mlp, gradients, overflow, same, snapshot

import amp_graph
from amp_graph import Policy

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("error::amp_graph.ConversionWarning"),
]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.words(ids)) @ self.words.weight.T


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Mlp(8, 4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))


def conv_net() -> nn.Module:
    first = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*first, nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 25, 4))


MODELS = {
    "mlp": (Mlp, lambda: torch.randn(8, 4, requires_grad=True)),
    "batch norm": (Net, lambda: torch.randn(8, 8)),
    "convolutions": (conv_net, lambda: torch.randn(4, 3, 16, 16)),
    "attention": (Attention, lambda: torch.randn(2, 6, 16, requires_grad=True)),
    "tied": (Tied, lambda: torch.randint(0, 11, (3, 5))),
    "checkpoint": (Checkpointed, lambda: torch.randn(3, 4, requires_grad=True)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scale", [None, 2.0**10])
def test_a_traced_graph_does_what_the_emitted_one_does(name, scale, traced) -> None:
    make, batch = MODELS[name]
    models = pair(make(), loss_scale=scale)
    assert_same_step(models, batch())
    for model in models:
        model.eval()
        model.zero_grad()
    assert_same_step(models, batch())
    with torch.no_grad():
        x = batch()
        assert_close(models[0](x), models[1](x))
    with torch.inference_mode():
        assert_close(models[0](x), models[1](x))


@pytest.mark.parametrize("name", ["mlp", "convolutions", "attention"])
def test_a_compiled_graph_does_what_the_emitted_one_does(name) -> None:
    make, batch = MODELS[name]
    models = pair(make())
    assert_same_step(models, batch())
    with MatmulCounter() as counter:
        models[1](batch())
    assert counter.low_share == 1


@pytest.mark.parametrize("requires_grad", [False, True])
def test_frozen_parameters_get_no_gradient(requires_grad, traced) -> None:
    model = Mlp()
    model.first.weight.requires_grad_(False)
    models = pair(model)
    assert_same_step(models, torch.randn(8, 4, requires_grad=requires_grad))
    models[0].zero_grad(), models[1].zero_grad()
    for each in models:
        each.first.weight.requires_grad_(True)
        each.second.weight.requires_grad_(False)
    assert_same_step(models, torch.randn(8, 4, requires_grad=requires_grad))
    assert models[1].first.weight.grad is not None and models[1].second.weight.grad is None


def test_writes_and_views_are_those_of_the_emitted_graph(traced) -> None:
    models = pair(Buffered())
    for batch in (3, 5, 6):
        x = torch.randn(batch, 4)
        inputs = [x.clone(), x.clone()]
        results = [m(i) for m, i in zip(models, inputs, strict=True)]
        for (y, view), given in zip(results, inputs, strict=True):
            assert torch.equal(given, 2 * x)
            assert view._base is given
            y.sum().backward()
        assert torch.equal(results[0][0], results[1][0])
        assert models[0].calls == models[1].calls


def test_other_batch_sizes_are_captured_once_more_and_then_symbolic() -> None:
    models = pair(Mlp())
    for batch in (8, 5, 7, 11):
        models[0].zero_grad(), models[1].zero_grad()
        assert_same_step(models, torch.randn(batch, 4))
    assert len(amp_graph.plans(models[1])) == 2


def test_dropout_drops_what_it_should_and_anew_each_time() -> None:
    model = nn.Sequential(nn.Linear(8, 4096, bias=False), nn.Dropout(0.25))
    model = amp_graph.convert(model, policy=Policy("bfloat16", compiler="inductor"))
    x = torch.randn(1, 8)
    kept = [model(x) != 0 for _ in range(2)]
    assert all(abs(k.float().mean() - 0.75) < 0.05 for k in kept)
    assert not torch.equal(*kept)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_training_follows_the_curve_of_eager(dtype, traced) -> None:
    models = pair(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)), dtype)
    x = torch.randn(32, 4)
    y = x.square().sum(1, keepdim=True)
    curves = []
    for model in models:
        optimizer = torch.optim.Adam(model.parameters(), 0.01, fused=True)
        losses = []
        for _ in range(30):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        curves.append(losses)
    assert curves[1] == pytest.approx(curves[0], rel=2 * BFLOAT16)
    assert curves[1][-1] < 0.8 * curves[1][0]


def test_gradients_that_overflow_skip_the_step(traced) -> None:
    _, model = pair(Mlp(), "float16")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for overflows in (False, True, False):
        before = snapshot(model, optimizer)
        model(torch.randn(8, 4)).square().mean().backward()
        if overflows:
            overflow(model)
        optimizer.step()
        optimizer.zero_grad()
        assert same(snapshot(model, optimizer), before) is overflows
    # inside of the graph: 2**16 times this is beyond float16
    before = snapshot(model)
    (model(torch.randn(8, 4)) * 2.0**10).sum().backward()
    assert any(not g.isfinite().all() for g in gradients(model))
    optimizer.step()
    assert same(snapshot(model), before)


def test_restore_and_deepcopy(traced) -> None:
    plain = Mlp()
    _, model = pair(copy.deepcopy(plain))
    x = torch.randn(8, 4)
    model(x)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.first.weight.zero_()
    assert torch.equal(twin(x), twin(2 * x)) and not torch.equal(model(x), twin(x))
    assert amp_graph.restore(model) is model
    assert torch.equal(model(x), plain(x))


def test_autocast_around_reaches_neither_forward_nor_backward(traced) -> None:
    models = pair(Mlp(), "float16")
    x = torch.randn(8, 4)
    results = []
    for model in models:
        with torch.autocast("cpu", torch.bfloat16):
            result = model(x)
            result.square().mean().backward()
        results.append(result)
    assert_close(*results)
    for a, b in zip(*map(gradients, models), strict=True):
        assert_close(a, b)
