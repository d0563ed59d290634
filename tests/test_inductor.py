"""Graphs that Inductor compiles do what the same graphs do operator by operator.

Generating and compiling C++ takes seconds for each graph, so most tests stop before it: graphs are
traced with their backward, functionalised and partitioned as for Inductor, and then run operator
by operator (`traced`). What remains of Inductor is its code generation, which a few tests run.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from counting import MatmulCounter
from nets import Net
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training import Mlp, distance, gradients, overflow, same, snapshot

import amp_graph
from amp_graph import ConversionWarning, Policy, PolicyError

BFLOAT16 = 2**-7  # a few roundings of 2**-9 each, in another order
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def traced(monkeypatch) -> None:
    as_for_inductor = aot_autograd(
        fw_compiler=boxed_nop,
        decompositions=select_decomp_table,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )

    def compile_fx(graph: Any, inputs: Any, config_patches: Any = None) -> Any:
        return as_for_inductor(graph, inputs)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)


@pytest.fixture(autouse=True)
def nothing_is_left_uncompiled(request):
    """Any warning of a fallback is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConversionWarning)
        yield


def pair(model: nn.Module, dtype: str = "bfloat16", **policy: Any) -> tuple[nn.Module, nn.Module]:
    """The model converted, in eager mode and compiled."""
    twin = copy.deepcopy(model)
    compiled = Policy(dtype, compiler="inductor", **policy)
    return amp_graph.convert(model, policy=Policy(dtype, **policy)), amp_graph.convert(
        twin, policy=compiled
    )


def assert_close(a: torch.Tensor, b: torch.Tensor, within: float = BFLOAT16) -> None:
    assert a.shape == b.shape and a.dtype is b.dtype and a.requires_grad is b.requires_grad
    assert distance(b, a) <= within


def assert_same_step(models: tuple[nn.Module, nn.Module], *args: Any) -> None:
    """One forward and backward pass of both: outputs, gradients and buffers agree."""
    results = []
    for model in models:
        torch.manual_seed(1)
        inputs = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
        result = model(*inputs)
        result.square().mean().backward()
        results.append((result, [x.grad for x in inputs]))
    (first, ins), (second, others) = results
    assert_close(first, second)
    a, b = [*gradients(models[0]), *ins], [*gradients(models[1]), *others]
    assert [_kind(g) for g in a] == [_kind(g) for g in b]
    # All as one: the gradient of a bias before batch norm is nothing but rounding.
    assert_close(*(torch.cat([g.flatten() for g in each if g is not None]) for each in (a, b)))
    for a, b in zip(models[0].buffers(), models[1].buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=BFLOAT16, atol=BFLOAT16)
    assert [p.uncompiled for p in amp_graph.plans(models[1])] == [None] * len(
        amp_graph.plans(models[1])
    )


def _kind(gradient: torch.Tensor | None) -> Any:
    return None if gradient is None else (gradient.dtype, gradient.shape)


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


class Buffered(nn.Module):
    """Writes into a buffer and its input, and returns a view of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        y = self.linear(x)
        x.mul_(2)
        return y, x[1:]


def conv_net() -> nn.Module:
    first = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*first, nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 25, 4))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, 4), nn.Linear(8, 2)
        self.lstm = nn.LSTM(4, 8, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.words(ids))[0])


MODELS = {
    "mlp": (Mlp, lambda: torch.randn(8, 4, requires_grad=True)),
    "batch norm": (Net, lambda: torch.randn(8, 8)),
    "convolutions": (conv_net, lambda: torch.randn(4, 3, 16, 16)),
    "attention": (Attention, lambda: torch.randn(2, 6, 16, requires_grad=True)),
    "lstm": (Recurrent, lambda: torch.randint(0, 11, (3, 5))),
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


def test_the_named_backend_compiles() -> None:
    eager = copy.deepcopy(model := Mlp())
    amp_graph.convert(eager, policy="bfloat16")
    options = {"dtype": "bfloat16", "compiler": "inductor"}
    compiled = torch.compile(model, backend="amp_graph", options=options)
    x = torch.randn(8, 4)
    with torch.autocast("cpu", torch.bfloat16):
        result = compiled(x)
    assert_close(eager(x), result)


def test_a_mode_of_the_named_backend_is_for_inductor(monkeypatch) -> None:
    seen = []

    def compile_fx(graph: Any, inputs: Any, config_patches: Any = None) -> Any:
        seen.append(config_patches)
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    torch.compile(Mlp(), backend="amp_graph", mode="reduce-overhead")(torch.randn(8, 4))
    model = Mlp()
    policy = Policy("bfloat16", compiler="inductor", compiler_options={"max_autotune": True})
    amp_graph.convert(model, policy=policy)(torch.randn(8, 4))
    assert seen == [{"triton.cudagraphs": True}, {"max_autotune": True}]


class Broken(Exception):
    pass


@pytest.mark.parametrize("where", ["torch._inductor.compile_fx.compile_fx", "bw_compiler"])
def test_a_graph_that_cannot_be_compiled_runs_operator_by_operator(where, monkeypatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise Broken("no such thing")

    if where == "bw_compiler":
        where = "torch._inductor.compile_fx.compile_fx_backward"
    monkeypatch.setattr(where, fail)
    eager, model = pair(Net())
    x = torch.randn(8, 8)
    with pytest.warns(ConversionWarning, match="not compiled.*no such thing") as caught:
        result = model(x)
    assert len(caught) == 1
    assert_same_results(eager, model, eager(x), result)
    (plan,) = amp_graph.plans(model)
    assert plan.fallback is None and "no such thing" in plan.uncompiled and plan.low
    assert "no such thing" in amp_graph.inspection.render(plan)
    assert any("no such thing" in why for why in amp_graph.explain(model).data.fallbacks)


def test_a_graph_that_fails_when_it_first_runs_does_too(monkeypatch) -> None:
    def compile_fx(graph: Any, inputs: Any, config_patches: Any = None) -> Any:
        def fail(*args: Any) -> Any:
            with torch.no_grad():
                for written in (a for a in args if a.dtype is torch.float32 and a.shape != (4, 4)):
                    written.add_(1)
            raise Broken("no such thing")

        return fail

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    eager, model = pair(Buffered())
    x = torch.randn(3, 4)
    expected = eager(x.clone())
    with pytest.warns(ConversionWarning, match="not compiled.*no such thing") as caught:
        found = model(x.clone())
    assert len(caught) == 1
    assert torch.equal(expected[0], found[0]) and torch.equal(expected[1], found[1])
    assert model.calls == 1
    (plan,) = amp_graph.plans(model)
    assert plan.fallback is None and "no such thing" in plan.uncompiled and plan.low


def assert_same_results(eager: nn.Module, model: nn.Module, a: Any, b: Any) -> None:
    assert torch.equal(a, b)
    a.sum().backward(), b.sum().backward()
    assert same(gradients(eager), gradients(model))


CACHED = """
import sys
import torch
from torch._dynamo.utils import counters
import amp_graph

torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
amp_graph.convert(model, policy=amp_graph.Policy("bfloat16", compiler="inductor"))
model(torch.randn(4, 8)).sum().backward()
print(counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"])
"""


def test_another_process_finds_the_graph_in_the_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-c", CACHED]
    outputs = [subprocess.check_output(command, text=True).split() for _ in range(2)]
    assert outputs == [["0", "0"], ["1", "2"]]


def test_low_precision_weights_are_inputs(traced) -> None:
    """No cast of a weight is left to the compiled graph."""
    counters.clear()
    _, model = pair(nn.Sequential(nn.Linear(8, 8, bias=False)))
    seen = []

    def compile_fx(graph: Any, inputs: Any, config_patches: Any = None) -> Any:
        seen.extend(inputs)
        return graph.forward

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
        model(torch.randn(4, 8))
    assert [(x.dtype, x.requires_grad) for x in seen] == [
        (torch.float32, True),
        (torch.float32, False),
        (torch.bfloat16, True),
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"compiler": "tvm"}, "'eager' or 'inductor'"),
        ({"compiler_options": "reduce-overhead"}, "for compiler='inductor'"),
        ({"compiler": "inductor", "compiler_options": "fast"}, "fast"),
        ({"compiler": "inductor", "compiler_options": 3}, "a mode of torch.compile or a mapping"),
    ],
)
def test_wrong_choices_are_refused(given, words) -> None:
    with pytest.raises(PolicyError, match=words):
        Policy(**given)
