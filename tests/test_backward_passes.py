"""Who is called in a backward pass, and passes inside of one another."""

from __future__ import annotations

import copy
from itertools import groupby

import pytest
import torch
from several_threads import gone_wrong_beside_one_another
from torch import Tensor, nn
from torch.optim import SGD
from training import FLOAT16, Mlp, X, assert_same_gradients, scaled, twins

import amp_graph
from amp_graph import LossScale
from amp_graph.scaling.cautious_scale import CautiousScale, bounded
from amp_graph.scaling.graph_scale import GraphScale

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "no_other_scales")


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_no_hook_is_called_for_what_the_loss_does_not_depend_on(kind: str) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.one, self.other = Mlp(), nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(self.trunk(x)), self.other(self.trunk(x))

    called: list[list[str]] = []
    for model in twins(Heads()):
        mine: list[str] = []
        getattr(model.other.weight, kind)(lambda _: None).remove()
        model(X)[0].sum().backward()  # its parameters leave in groups
        for name, p in model.named_parameters():
            getattr(p, kind)(lambda _, name=name, mine=mine: mine.append(name))
        model(X)[0].sum().backward()
        called.append(sorted(mine))
        assert model.other.weight.grad is None
    assert called[0] == called[1] and "one.weight" in called[0]


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@pytest.mark.skipif(torch.__version__ < "2.13", reason="an order cannot be asked for before")
def test_hooks_are_called_during_the_backward_pass_and_the_last_layers_first() -> None:
    orders = []
    for model in twins(Chain()):
        order: list[str] = []
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda _, n=name, o=order: o.append(n))
        result = model(torch.randn(2, 6))
        nodes = [result.grad_fn]
        for node in nodes:
            nodes += [behind for behind, _ in node.next_functions if behind is not None]
            if "Relu" in node.name():
                node.register_prehook(lambda _, o=order: o.append("relu"))
        result.sum().backward()
        orders.append([[*sorted(names)] for is_relu, names in groupby(order, "relu".__eq__)])
    assert orders[0] == orders[1]
    assert orders[0][:2] == [["relu"], ["layers.3.bias", "layers.3.weight"]]


def test_backward_passes_inside_of_one_another_and_beside_have_scales_of_their_own() -> None:
    """No optimizer is known yet, so the scale follows from the gradients that come in."""
    plain, model = twins(Mlp())
    model = amp_graph.convert(amp_graph.restore(model), policy="float16")
    for each in (plain, model):
        x = X.clone().requires_grad_()

        def inside(_: Tensor, each: nn.Module = each) -> None:
            with torch.enable_grad():
                other = (each(X) * 1e4).sum()
            torch.autograd.grad(other, [each.first.weight])

        x.register_hook(inside)
        each(x).sum().mul(1e-3).backward()
    assert_same_gradients(model, plain)

    assert not gone_wrong_beside_one_another(plain, model)


def test_a_pass_outlives_many_that_begin_after_it() -> None:
    """As one of a thread that waits for its turn does."""
    plain, model = twins(Mlp())
    model = amp_graph.convert(amp_graph.restore(model), policy="float16")

    def inside(_: Tensor) -> None:
        for _ in range(100):
            with torch.enable_grad():
                other = (model(X) * 1e4).sum()
            torch.autograd.grad(other, [model.first.bias])

    model.second.weight.register_hook(inside)  # so that it leaves before the others
    for each in (plain, model):
        each(X).sum().mul(1e-3).backward()
    assert_same_gradients(model, plain)


def test_no_overflow_reaches_weights_of_losses_that_are_trained_on_gradients() -> None:
    """As GradNorm does: the last pass goes out to them by way of what came in first."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    weights = nn.Parameter(torch.ones(2))
    of_model, of_weights = SGD(model.parameters(), lr=1e-3), SGD([weights], lr=1e-3)
    amp_graph.convert(model, of_model, policy=scaled(2.0**20))
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))
    for _ in range(12):
        of_model.zero_grad()
        y = model(x)
        weighted = weights * torch.stack([y.square().mean(), (y - 3).square().mean()])
        weighted.sum().backward(retain_graph=True)
        norms = [
            torch.autograd.grad(one, model[0].weight, create_graph=True)[0].norm()
            for one in weighted
        ]
        weights.grad = torch.autograd.grad(100 * sum(norms), weights)[0]
        of_model.step()
        of_weights.step()
    assert all(p.isfinite().all() for p in (weights, *model.parameters()))
    assert amp_graph.step_counts(of_weights).stepped > 0
    assert amp_graph.step_counts(of_weights).skipped > 0


def test_anomaly_detection_finds_no_overflow_that_is_the_loss_scale_s() -> None:
    """It raises for the first NaN, of which float32 would have had none."""
    plain, model = twins(Mlp())
    SGD(model.parameters(), lr=0.0).step()
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        for each in (plain, model):
            (each(X) * 64).square().sum().backward()
    assert_same_gradients(model, plain)


def test_a_static_scale_is_that_of_a_pass_nobody_watches_too() -> None:
    """However large what comes in is, of many numbers or of one."""
    config, given = LossScale.static(128.0), torch.tensor(128.0)
    for gradient in (torch.full((2,), 1e3), torch.tensor(1e3)):
        assert bounded(given, gradient, 1.0, config)[0] == 128


class Wide(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).double()


def test_a_gradient_in_float64_comes_into_a_pass_nobody_watches() -> None:
    plain = Wide()
    model = amp_graph.convert(copy.deepcopy(plain), policy="float16")
    for each in (plain, model):
        (each(X) * 1e3).square().sum().backward()
    assert_same_gradients(model, plain, 2 * FLOAT16)


def test_parameters_that_are_given_for_a_call_beside_an_input_whose_gradient_is_wanted() -> None:
    """An optimizer of theirs skips what overflows."""
    model = amp_graph.convert(Mlp(), policy="float16")
    given = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    optimizer = SGD(given.values(), lr=0.1)
    x = X.clone().requires_grad_()
    (torch.func.functional_call(model, given, (x,)).sum() * 1e30).backward()
    assert not all(p.grad is None or bool(p.grad.isfinite().all()) for p in given.values())
    optimizer.step()
    assert all(bool(p.isfinite().all()) for p in given.values())


def test_a_gradient_that_nobody_watches_is_held_if_it_is_differentiated_again() -> None:
    model = amp_graph.convert(nn.Linear(1, 1, bias=False), policy="float16")
    nn.init.constant_(model.weight, 60000.0)
    x = torch.zeros(1, 1, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert gradient.item() == 60000


@pytest.mark.parametrize(
    ("guarded", "double_backward", "expected"),
    [(2.0**16, False, 2.0**9), (2.0**16, True, 2.0**3), (2.0**-10, False, 1.0)],
)
def test_the_scale_of_a_pass_that_is_differentiated_again(
    guarded: float, double_backward: bool, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves room for the passes that follow, and is not lowered with that of the last one."""
    scale = GraphScale(LossScale(guarded), nn.Linear(2, 2).parameters)
    scale.has_optimizer = True
    monkeypatch.setattr("amp_graph.scaling.cautious_scale.backward_pass", lambda: 7)
    incoming = torch.full((4,), 2.0**-3)
    chosen = CautiousScale().factor(scale, incoming, True, double_backward)
    assert chosen == expected


def test_scales_of_the_oldest_passes_are_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody steps no round ends, and they would pile up."""
    scale, caution = GraphScale(LossScale(), nn.Linear(2, 2).parameters), CautiousScale()
    monkeypatch.setattr("amp_graph.scaling.cautious_scale.PASSES", 2)
    for number in range(4):
        monkeypatch.setattr("amp_graph.scaling.cautious_scale.backward_pass", lambda n=number: n)
        caution.factor(scale, torch.ones(4), create_graph=False)
    assert [*caution.chosen] == [2, 3]
