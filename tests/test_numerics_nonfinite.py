"""The first value or gradient that is not finite is attributed to who made it, and where."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import zoo
from nets import Net
from planted import FourLayers
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_graph

NAN = float("nan")
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Planted(FourLayers):
    def go_wrong(self, x: torch.Tensor) -> torch.Tensor:
        if self.fault == "overflow":
            x = x * 3e4 * 1e-4
        if self.fault == "nan":
            x = x + (x - x).sum() / (x - x).sum()
        if self.fault == "backward":
            x = Explode.apply(x)
        if self.fault == "mask":
            x = x.masked_fill(x > 0, float("-inf")).softmax(-1)
        if self.fault == "harmless":
            x = x + torch.exp(torch.zeros_like(x).log())
        if self.fault == "checkpoint":
            x = checkpoint(lambda y: self.layers[0](y) * 3e4, x, use_reentrant=False)
        if self.fault == "function":
            x = Scaled.apply(x)
        if self.fault == "branch":
            x = torch.cond(x.isfinite().all(), lambda y: (y * 4e4).clone(), torch.relu, (x,))
        return x


class Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * 1e30 * 1e30


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x @ x.mT @ x).mul(2e4)

    @staticmethod
    def backward(ctx, g):
        return g.clone()


def find(fault: str, policy: str = "float16", **options):
    model = amp_graph.convert(Planted(fault), policy=policy)
    return amp_graph.find_nonfinite(model, torch.randn(4, 8) * 40, **options)


def line_of(text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"test_numerics_nonfinite.py:{1 + next(i for i, t in enumerate(lines) if text in t)}"


def test_a_planted_overflow() -> None:
    found = find("overflow")
    assert found is not None
    assert (found.phase, found.node, found.operator) == ("forward", "mul", "aten.mul.Tensor")
    assert found.kind in ("inf", "-inf") and found.dtype == "float16"
    assert found.source.startswith(line_of("x * 3e4 * 1e-4"))
    assert found.code == "x = x * 3e4 * 1e-4"
    assert not found.in_float32
    assert "first" in str(found) and found.code in str(found)


def test_a_planted_nan() -> None:
    found = find("nan")
    assert found is not None
    assert (found.phase, found.kind, found.operator) == ("forward", "NaN", "aten.div.Tensor")
    assert found.source.startswith(line_of("(x - x).sum() / "))
    assert found.in_float32


def test_an_overflow_in_backward() -> None:
    found = find("", loss_scale=1e30)
    assert found is not None
    assert found.phase == "backward"
    assert found.node == "linear_3"
    assert found.module == "layers.3"


def test_an_infinite_loss_is_explained_by_the_value_that_made_it() -> None:
    class LogOfZero(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = (torch.arange(8) < 4).float().log()  # does no harm
            return self.fc(x * (x + mask).softmax(-1)).relu().log()

    found = amp_graph.find_nonfinite(LogOfZero(), torch.randn(4, 8), policy="bfloat16")
    assert found is not None and found.in_float32
    assert (found.phase, found.node, found.kind) == ("forward", "log_1", "-inf")


def test_a_custom_backward_is_named() -> None:
    found = find("backward")
    assert found is not None
    assert (found.phase, found.in_float32) == ("backward", True)
    assert found.node.startswith("autograd_function")


@pytest.mark.parametrize("fault", ["", "mask", "harmless"])
def test_all_is_well(fault: str) -> None:
    assert find(fault, "bfloat16") is None


def test_inside_a_checkpoint() -> None:
    found = find("checkpoint")
    assert found is not None
    assert (found.operator, found.phase) == ("aten.mul.Tensor", "forward")
    assert found.source.startswith(line_of("(y) * 3e4"))


@pytest.mark.parametrize(("fault", "line"), [("function", ".mul(2e4)"), ("branch", "(y * 4e4)")])
def test_inside_a_body(fault: str, line: str) -> None:
    if fault == "function" and torch.__version__ < "2.12":
        line = "Scaled.apply(x)"  # a body hands out all that it computes, so that it stays float32
    found = find(fault)
    assert found is not None
    assert (found.phase, found.in_float32) == ("forward", False)
    assert found.source.startswith(line_of(line))


def test_what_comes_in_from_outside() -> None:
    model = amp_graph.convert(Net().eval(), policy="float16")
    x = torch.randn(4, 8)
    x[0, 0] = float("nan")
    found = amp_graph.find_nonfinite(model, x)
    assert found is not None and found.operator == "placeholder" and found.kind == "NaN"
    with torch.no_grad():
        model.second.weight[0, 0] = float("inf")
    found = amp_graph.find_nonfinite(model, torch.randn(4, 8))
    assert found is not None and found.node == "second.weight"


def test_a_loss_outside_of_the_graph() -> None:
    model = amp_graph.convert(Net().eval(), policy="float16")
    found = amp_graph.find_nonfinite(model, torch.randn(4, 8), loss=lambda y: (y - y).sqrt().sum())
    assert found is not None
    assert (found.phase, found.node) == ("backward", "the loss")
    found = amp_graph.find_nonfinite(model, torch.randn(4, 8), loss=lambda y: y.sum() * 0 + NAN)
    assert found is not None
    assert (found.phase, found.node, found.graph) == ("forward", "the loss", None)


class TakesGradient(nn.Module):
    """Its graph runs under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slope = torch.func.grad(lambda y: y.square().sum())(x)
        return self.layer(x * 3e4) + slope


def test_code_that_no_graph_stands_for() -> None:
    model, x = amp_graph.convert(TakesGradient(), policy="float16"), torch.ones(4, 8)
    with torch.no_grad():
        model.layer.weight.fill_(1.0)
    found = amp_graph.find_nonfinite(model, x)
    assert found is not None
    assert (found.kind, found.graph, found.in_float32) == ("inf", None, False)
    assert str(found).startswith("first inf in forward: value from code outside of the graphs")


def test_the_model_stays_as_it_was() -> None:
    model = amp_graph.convert(Net(), policy="float16")
    x = torch.randn(4, 8)
    model(x).sum().backward()
    state = copy.deepcopy(model.state_dict())
    gradients = [p.grad.clone() for p in model.parameters()]
    random, plans = torch.get_rng_state(), amp_graph.plans(model)
    amp_graph.find_nonfinite(model, x)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert amp_graph.plans(model) == plans
    assert all(not p._backward_hooks for p in model.parameters())


@pytest.mark.parametrize("name", ["gpt2", "bert", "convnet", "lstm", "t5", "swin", "checkpointed"])
def test_sound_models_are_left_alone(name: str) -> None:
    case = next(c for c in zoo.cases() if c.name == name)
    args, kwargs = case.batch(0, 0)
    assert not args or not kwargs
    model = amp_graph.convert(case.make(), policy="bfloat16")
    assert amp_graph.find_nonfinite(model, kwargs or args, loss=case.loss) is None


class Reassigns(nn.Module):
    """A buffer that is another tensor after each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return hidden - self.mean


@pytest.mark.parametrize("tool", ["compare", "find_nonfinite", "calibrate", "convert"])
def test_tools_leave_buffers_as_they_were(tool: str) -> None:
    model, x = Reassigns(), torch.randn(8, 4)
    mean = model.mean
    if tool == "calibrate":
        amp_graph.calibrate(model, [x], 0.5, policy="bfloat16")
    elif tool == "convert":
        amp_graph.convert(model, policy="bfloat16", example_inputs=(x,))
    else:
        getattr(amp_graph, tool)(model, x, policy="bfloat16")
    assert model.mean is mean and not mean.any()


def test_a_model_that_takes_gradients_inside_can_be_compared() -> None:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                energy = self.last(torch.tanh(self.first(x))).sum()
                (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return self.first(x), force

    comparison = amp_graph.compare(Force(), torch.randn(6, 4), policy="bfloat16")
    assert 0 < comparison.outputs < 0.05
