"""Asking for Inductor: where, with which settings, and what happens when it cannot compile."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from compiled import COMPILE_FX, Buffered, assert_close, pair
from nets import Net, low_share
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils.checkpoint import checkpoint
from training import Mlp, assert_same_gradients, gradients, same

import amp_graph
from amp_graph import AmpGraphError, ConversionWarning, Policy, PolicyError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X8 = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


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

    monkeypatch.setattr(COMPILE_FX, compile_fx)
    torch.compile(Mlp(), backend="amp_graph", mode="reduce-overhead")(torch.randn(8, 4))
    model = Mlp()
    policy = Policy("bfloat16", compiler="inductor", compiler_options={"max_autotune": True})
    amp_graph.convert(model, policy=policy)(torch.randn(8, 4))
    assert seen == [{"triton.cudagraphs": True}, {"max_autotune": True}]


class Broken(Exception):
    pass


@pytest.mark.parametrize("where", [COMPILE_FX, "bw_compiler"])
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
                for written in (a for a in args if not a.requires_grad):  # no parameter
                    written.add_(1)
            raise Broken("no such thing")

        return fail

    monkeypatch.setattr(COMPILE_FX, compile_fx)
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


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_run_low_though_they_are_not_compiled(kind) -> None:
    """Inductor would unroll one, in a minute for each length of a sequence."""
    eager, model = pair(kind(4, 8, batch_first=True))
    with pytest.warns(ConversionWarning, match="not compiled.*would unroll a recurrent layer"):
        model(torch.randn(3, 5, 4))
    for length in (6, 7, 8):
        x = torch.randn(3, length, 4)
        assert_same_results(eager, model, eager(x)[0], model(x)[0])
        eager.zero_grad(), model.zero_grad()
    assert len(amp_graph.plans(model)) <= 2
    assert low_share(model, x) == 1


def test_nor_is_one_inside_of_a_checkpoint() -> None:
    eager, model = pair(Checkpointed())
    x = torch.randn(3, 5, 4)
    with pytest.warns(ConversionWarning, match="not compiled.*would unroll a recurrent layer"):
        result = model(x)
    assert_same_results(eager, model, eager(x), result)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(4, 4), nn.LSTM(4, 8, batch_first=True)

    def forward(self, x: Any) -> Any:
        return checkpoint(lambda h: self.layer(h)[0], self.first(x), use_reentrant=False)


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
policy = amp_graph.Policy("bfloat16", compiler="inductor", loss_scale=SCALE)
amp_graph.convert(model, policy=policy)
model(torch.randn(4, 8)).sum().backward()
print(counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.parametrize("scale", [None, 4.0])
def test_another_process_finds_the_graph_in_the_cache(scale) -> None:
    command = [sys.executable, "-c", CACHED.replace("SCALE", str(scale))]
    outputs = [subprocess.check_output(command, text=True).split() for _ in range(2)]
    assert outputs[1] == ["1", "2"]  # forward and backward; perhaps an earlier run cached them


@pytest.mark.parametrize(
    ("options", "inputs"),
    [
        ({"refresh_weights": "on_change"}, torch.bfloat16),
        ({}, torch.float32),
    ],
)
def test_weights_that_stand_apart_are_inputs_and_stay_where_they_are(
    options, inputs, monkeypatch
) -> None:
    """No cast of one is left to the compiled graph, and CUDA graphs need not copy it. One that is
    made anew in each call is cast inside, where that costs no call, as is its gradient."""
    seen, static = [], []

    def look(graph: Any, inputs: Any) -> Any:
        static.extend(torch._guards.TracingContext.get().fw_metadata.static_input_indices)
        return make_boxed_func(graph.forward)

    def compile_fx(graph: Any, inputs: Any, config_patches: Any = None) -> Any:
        seen.extend((tuple(x.shape), x.dtype, x.requires_grad) for x in inputs)
        return aot_autograd(fw_compiler=look)(graph, inputs)

    monkeypatch.setattr(COMPILE_FX, compile_fx)
    _, model = pair(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 2, bias=False)), **options)
    model[1].weight.requires_grad_(False)
    model(torch.randn(4, 8)).sum().backward()
    weights = {((6, 8), inputs, True), ((6,), inputs, True), ((2, 6), inputs, False)}
    assert {*seen} == {*weights, ((4, 8), torch.float32, False)}
    assert {i for i, (shape, *_) in enumerate(seen) if shape != (4, 8)} <= {*static}
    assert all(p.grad is None or p.grad.dtype is torch.float32 for p in model.parameters())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_graph_may_be_kept_for_another_backward_pass(dtype: str) -> None:
    """As by `torch.compile`, if the first pass keeps it."""
    plain = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    model = copy.deepcopy(plain)
    amp_graph.convert(model, policy=Policy(dtype, compiler="inductor"))
    for each in (plain, model):
        x = X8.clone().requires_grad_()
        y = each(x)
        (saliency,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        y.square().sum().backward(retain_graph=True)
        (y.sum() + saliency.square().sum()).backward()
    assert_same_gradients(model, plain, 0.05)
    (plan,) = amp_graph.plans(model)
    assert not plan.uncompiled


def penalty_of_input(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def penalty_of_weights(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum(gradient.square().sum() for gradient in found)


def test_a_second_derivative_is_not_said_to_be_0(traced) -> None:
    """PyTorch knows of no way from a compiled backward pass to what it saved in low precision."""
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model = amp_graph.convert(plain, policy=Policy("bfloat16", compiler="inductor"))
    with pytest.raises(AmpGraphError, match='set compiler="eager"'):
        torch.autograd.functional.hessian(lambda x: model(x).sum(), X8)
    bias = model[0].bias
    (gradient,) = torch.autograd.grad(model(X8).sum(), bias, create_graph=True)
    with pytest.raises(AmpGraphError, match='set compiler="eager"'):
        torch.autograd.grad(gradient.sum(), bias, allow_unused=True)


@pytest.mark.parametrize("penalty", [penalty_of_input, penalty_of_weights])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_second_derivative_is_an_error_that_says_what_to_set(dtype, penalty, traced) -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Unflatten(1, (2, 4)))
    model = amp_graph.convert(plain, policy=Policy(dtype, compiler="inductor"))
    x = X8.clone().requires_grad_()
    value = penalty(model, x)
    assert value.isfinite()
    with pytest.raises(RuntimeError, match='set compiler="eager"') as told:
        value.backward()
    assert isinstance(told.value, AmpGraphError)
    model(x).sum().backward()  # goes on


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
