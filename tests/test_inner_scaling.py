"""Graphs that are compiled scale their gradients inside, and the gradients are true."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from compiled import COMPILE_FX, assert_close
from counting import Names
from torch import Tensor, fx, nn
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint
from training import FLOAT16, Mlp, assert_same_gradients, distance, same, snapshot, twins

import amp_graph
from amp_graph import LossScale, Policy
from amp_graph.training.inner_scaling import ENTER, LEAVE

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(12).view(3, 4) % 11
CHECK = "_amp_foreach_non_finite_check_and_unscale_"

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo", "no_other_scales"),
    pytest.mark.filterwarnings("error::amp_graph.ConversionWarning"),
]


@pytest.fixture
def graphs(traced, monkeypatch) -> list[fx.GraphModule]:
    """What is handed over to Inductor."""
    seen = []
    compile_fx = torch._inductor.compile_fx.compile_fx

    def look(graph: fx.GraphModule, *args: Any, **options: Any) -> Any:
        seen.append(graph)
        return compile_fx(graph, *args, **options)

    monkeypatch.setattr(COMPILE_FX, look)
    return seen


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    return amp_graph.convert(model, policy=Policy("float16", compiler="inductor", **options))


def count(graphs: list[fx.GraphModule], target: Any) -> int:
    return sum(node.target is target for graph in graphs for node in graph.graph.nodes)


class Words(nn.Module):
    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        if is_tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(ids)))


class Several(nn.Module):
    """Returns a loss in float32, what it was made of, twice, and what carries no gradient, of
    floats and of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Mlp(8, 4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.body(x)
        y = self.head(h)
        return y.square().mean(), y, h, y, h.detach().sum(), y.argmax(1)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


class Frozen(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


class Rotated(nn.Module):
    """With a part that is not recorded, as rotary embeddings are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            angles = self.first(x).sin()
        return self.last(torch.tanh(self.first(x)) * angles)


MODELS = {
    "mlp": (Mlp, X, 4),
    "tied words": (lambda: Words(True), IDS, 2),
    "words": (lambda: Words(False), IDS, 2),
    "several results": (Several, X, 6),
    "batch norm": (Normed, X, 5),
    "frozen": (Frozen, X, 4),
    "not recorded in part": (Rotated, X, 4),
}


def loss_of(result: Any) -> Tensor:
    parts = result if isinstance(result, tuple) else (result,)
    return sum(part.float().square().mean() for part in parts if part.requires_grad)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("has_optimizer", [False, True])
def test_gradients_are_scaled_inside_and_true(name, has_optimizer, graphs) -> None:
    make, x, entering = MODELS[name]
    plain, model = twins(make())
    compiled(amp_graph.restore(model), loss_scale=2.0**10)
    if has_optimizer:
        SGD(model.parameters(), lr=0.0).step()
    for step in range(2):
        for each in (plain, model):
            each.zero_grad()
            torch.manual_seed(step)
            loss_of(each(x)).backward()
        assert_same_gradients(model, plain, 2 * FLOAT16)
    assert count(graphs, ENTER) == entering * len(graphs)
    assert count(graphs, LEAVE) >= len(graphs)
    results, expected = model(x), plain(x)
    if name == "several results":
        assert results[1] is results[3] and results[2].dtype is torch.float32
        assert [r.requires_grad for r in results] == [r.requires_grad for r in expected]


@pytest.mark.parametrize("has_optimizer", [False, True])
def test_gradients_that_float16_cannot_hold_are_there(has_optimizer, graphs) -> None:
    """2**-26 times a gradient of about 1 is nothing in float16."""
    plain, model = twins(Mlp())
    compiled(amp_graph.restore(model))
    if has_optimizer:
        SGD(model.parameters(), lr=0.0).step()
    x, y = (X.clone().requires_grad_() for _ in range(2))
    (plain(x).mean() * 2.0**-26).backward()
    (model(y).mean() * 2.0**-26).backward()
    assert_same_gradients(model, plain)
    assert distance(y.grad, x.grad) <= FLOAT16
    assert count(graphs, ENTER) == 5


class ReturnsAView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return y, y[1:]


class ReturnsAWeight(ReturnsAView):
    def forward(self, x: Tensor) -> Any:
        return self.linear(x), self.linear.weight[1:]


class WritesIntoABuffer(ReturnsAView):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8, 4))

    def forward(self, x: Tensor) -> Any:
        self.seen = self.seen.detach()
        self.seen.copy_(self.linear(x))
        return self.seen * 2


@pytest.mark.parametrize("make", [ReturnsAView, ReturnsAWeight, WritesIntoABuffer])
def test_what_shares_memory_with_something_outside_is_scaled_there(make, graphs) -> None:
    plain, model = twins(make())
    compiled(amp_graph.restore(model), loss_scale=2.0**10)
    for each in (plain, model):
        loss_of(each(X)).backward()
    assert_same_gradients(model, plain)
    assert graphs and not count(graphs, ENTER) + count(graphs, LEAVE)


def test_a_gradscaler_of_the_user_s_has_the_model_unscaled(graphs) -> None:
    plain, model = twins(Mlp())
    compiled(amp_graph.restore(model))
    optimizer = SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(X).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    plain(X).square().mean().backward()
    assert_same_gradients(model, plain)
    assert count(graphs, ENTER)


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_value_, nn.utils.clip_grad_norm_, None])
def test_an_overflow_inside_skips_the_step_though_gradients_were_clipped(clip, graphs) -> None:
    model = compiled(Mlp())
    optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
    for factor, steps in ((1.0, True), (2.0**20, False), (1.0, True)):
        before = snapshot(model)
        optimizer.zero_grad()
        (model(X) * factor).mean().backward()
        if clip is not None:
            clip(model.parameters(), 1.0)
        optimizer.step()
        assert same(snapshot(model), before) is not steps
    assert count(graphs, ENTER)


@pytest.mark.parametrize("passes", [1, 3])
def test_gradients_are_looked_at_once_for_each_backward_pass(passes, graphs) -> None:
    model = compiled(Mlp())
    optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(3):
        optimizer.zero_grad()
        with Names() as names:
            for _ in range(passes):
                model(X).square().mean().backward()
            optimizer.step()
    assert names.names.count(CHECK) == passes
    assert amp_graph.step_counts(optimizer).stepped == 3


@pytest.mark.parametrize("wanted", ["inputs", "all"])
def test_selected_gradients_are_true_and_looked_at_by_the_step(wanted, graphs) -> None:
    plain, model = twins(Mlp())
    compiled(amp_graph.restore(model))
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.step()
    for each in (plain, model):
        weights = [each.first.weight] if wanted == "inputs" else [*each.parameters()]
        each(X).square().mean().backward(inputs=weights)
    assert_same_gradients(model, plain)
    model.first.weight.grad.fill_(torch.inf)
    before = snapshot(model)
    optimizer.step()
    assert same(snapshot(model), before)


@pytest.mark.parametrize("has_optimizer", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_model(reentrant, has_optimizer, graphs) -> None:
    plain, model = twins(Mlp())
    compiled(amp_graph.restore(model))
    if has_optimizer:
        SGD(model.parameters(), lr=0.0).step()
    inputs = [X.clone().requires_grad_() for _ in range(2)]
    for each, x in zip((plain, model), inputs, strict=True):
        (checkpoint(each, x, use_reentrant=reentrant).square().mean() * 2.0**-18).backward()
    assert_same_gradients(model, plain)
    assert distance(inputs[1].grad, inputs[0].grad) <= FLOAT16


def test_threads_whose_passes_choose_their_own_scales(graphs) -> None:
    """No optimizer is known."""
    plain, model = twins(Mlp())
    compiled(amp_graph.restore(model))
    wrong: list[float] = []
    model(X)

    def train(size: float) -> None:
        (expected,) = torch.autograd.grad((plain(X) * size).sum(), [plain.second.weight])
        for _ in range(30):
            (found,) = torch.autograd.grad((model(X) * size).sum(), [model.second.weight])
            wrong.extend([size] if distance(found, expected) > FLOAT16 else [])

    threads = [threading.Thread(target=train, args=(size,)) for size in (1e-3, 1e3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.filterwarnings("error:The .grad attribute")
def test_parameters_that_were_computed(graphs) -> None:
    plain, model = twins(Mlp())
    compiled(amp_graph.restore(model))
    sources = [{k: p.detach().requires_grad_() for k, p in plain.named_parameters()} for _ in "12"]
    for each, source in zip((plain, model), sources, strict=True):
        computed = {k: p * 2 for k, p in source.items()}
        torch.func.functional_call(each, computed, (X,)).square().mean().backward()
    for name, expected in sources[0].items():
        assert distance(sources[1][name].grad, expected.grad) <= FLOAT16
    assert count(graphs, ENTER)


class Broken(nn.Module):
    """Of two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.second(h)


@pytest.mark.filterwarnings("default::amp_graph.ConversionWarning")
def test_a_model_of_two_graphs(graphs) -> None:
    plain, model = twins(Broken())
    compiled(amp_graph.restore(model))
    optimizer = SGD(model.parameters(), lr=0.1)
    for each in (plain, model):
        each(X).square().mean().backward()
    assert_same_gradients(model, plain)
    assert len(graphs) == 2 and count(graphs, ENTER) == 5
    optimizer.step()
    optimizer.zero_grad()
    before = snapshot(model)
    (model(X) * 2.0**20).mean().backward()
    optimizer.step()
    assert same(snapshot(model), before)
    assert amp_graph.step_counts(optimizer).skipped == 1


def test_what_cannot_be_compiled_runs_by_operator_with_the_same_gradients(monkeypatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("no C++ here")

    monkeypatch.setattr(COMPILE_FX, fail)
    plain, model = twins(Several())
    with pytest.warns(amp_graph.ConversionWarning, match="no C\\+\\+ here"):
        compiled(amp_graph.restore(model))(X)
    for each in (plain, model):
        each.zero_grad()
        loss_of(each(X)).backward()
    assert_same_gradients(model, plain)


def test_evaluation_is_unscaled_and_the_same(graphs) -> None:
    plain, model = twins(Mlp())
    compiled(amp_graph.restore(model))
    with torch.no_grad():
        assert_close(model(X), plain(X), FLOAT16)
    with torch.inference_mode():
        assert_close(model(X), plain(X), FLOAT16)
    model(X).square().mean().backward()
    plain(X).square().mean().backward()
    assert_same_gradients(model, plain)


def test_the_abort_names_the_operator(graphs) -> None:
    model = compiled(Mlp(), loss_scale=LossScale(abort_after=3))
    optimizer = SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(20):
            optimizer.zero_grad()
            (model(X) * 2.0**100).sum().backward()
            optimizer.step()

    with pytest.raises(amp_graph.OverflowAbort, match=r"gave for aten\.linear\.default in module"):
        train()
