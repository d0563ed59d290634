"""Gradients that no optimizer looks at: the loss scale is no larger than what comes in allows."""

from __future__ import annotations

import copy
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from training import FLOAT16, Mlp, X, Y, assert_same_gradients, distance, twins

import amp_graph
from amp_graph import LossScale
from amp_graph.scaling.cautious_scale import CautiousScale, ExposedScale, are_wanted, bounded
from amp_graph.scaling.graph_scale import GraphScale

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Divided(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) - Y).square().mean() * 1e-6


def test_the_weight_of_a_loss_says_little_about_gradients() -> None:
    """Brought down to 1 it would take the gradients of what the loss divides beneath float16."""
    plain = Divided()
    model = amp_graph.convert(copy.deepcopy(plain), policy="float16")
    for each in (plain, model):
        (each(X) * 1e6).backward()
    assert_same_gradients(model, plain)


class Large(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1000


@pytest.mark.parametrize("magnitude", [1.0, 1e3])
def test_large_gradients_without_an_optimizer(magnitude: float) -> None:
    """Nobody would notice an overflow, or lower the scale."""
    plain = Large()
    model = amp_graph.convert(copy.deepcopy(plain), policy="float16")
    for each in (plain, model):
        (each(X) * magnitude).sum().backward()
    assert_same_gradients(model, plain)


def test_large_gradients_that_are_looked_at_after_training() -> None:
    """Grad-CAM: no step skips them, though an optimizer is known that did so before."""
    plain = Large()
    model = amp_graph.convert(copy.deepcopy(plain), policy="float16")
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=1e-9)
        for _ in range(2):
            (each(X) * 1e-3).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        each.eval()
        each(X).sum().backward()
    assert_same_gradients(model, plain)


class Broken(Mlp):
    """In two graphs, of which the inputs of the second are results of the first."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.second(x) * 2


def gradient(model: nn.Module, kind: str) -> Tensor:
    """Of an input; 1 comes in, which times 2^16 is no float16."""
    x = X.clone().requires_grad_()
    if kind == "saliency":
        model(x)[:, 0].sum().backward()
    elif kind == "adversarial":
        F.cross_entropy(-1e4 * model(x[:1]), model(x[:1]).argmax(1)).backward()
    else:
        return torch.autograd.grad(model(x).sum(), x)[0]
    return x.grad


@pytest.mark.parametrize("make", [Mlp, Broken])
@pytest.mark.parametrize("kind", ["saliency", "adversarial", "energy"])
def test_gradients_of_inputs_are_finite_beside_training(make: type[Mlp], kind: str) -> None:
    plain, model = twins(make())
    for each in (plain, model):
        (each(X) - Y).square().mean().backward()
        each.zero_grad()
    for _ in range(2):
        expected = gradient(plain, kind)
        assert expected.any() and distance(gradient(model, kind), expected) <= FLOAT16
    assert amp_graph.scale_of(model).get_scale() == 2.0**16


def test_one_pass_through_both_kinds_of_calls() -> None:
    plain, model = twins(Mlp())
    x, expected = X.clone().requires_grad_(), X.clone().requires_grad_()
    for each, attacked in ((plain, expected), (model, x)):
        loss = (each(X) * 1e-6).sum() + each(attacked).sum() + (each(X + 1) * 1e-6).sum()
        loss.backward()
    assert distance(x.grad, expected.grad) <= FLOAT16
    assert_same_gradients(model, plain)


def test_the_small_gradients_of_training_keep_their_scale() -> None:
    """After a call of the other kind, and with a penalty on the gradient of an input."""
    plain, model = twins(Mlp())
    for each in (plain, model):
        gradient(each, "saliency")
        each.zero_grad()
        (each(X).square().mean() * 1e-7).backward()
        x = X.clone().requires_grad_()
        (found,) = torch.autograd.grad(each(x).sum() * 1e-6, x, create_graph=True)
        found.sum().backward()
    assert_same_gradients(model, plain)


def derivative(kind: str, model: nn.Module, x: Tensor, direction: Tensor) -> Tensor:
    functional = torch.autograd.functional
    if kind == "jacobian":
        return functional.jacobian(model, x, vectorize=True)
    if kind == "jvp":
        return functional.jvp(model, x, direction)[1]

    def loss(x: Tensor) -> Tensor:
        return model(x).square().sum()

    if kind == "hessian":
        return functional.hessian(loss, x, vectorize=True)
    return functional.hvp(loss, x, direction)[1]


@pytest.mark.parametrize("kind", ["jacobian", "hessian", "hvp", "jvp"])
@pytest.mark.parametrize("is_known", [False, True])
def test_functional_derivatives(kind: str, is_known: bool) -> None:
    plain = Mlp()
    model = twins(plain)[1] if is_known else copy.deepcopy(plain)
    if not is_known:
        amp_graph.convert(model, policy="float16")
    expected, found = (derivative(kind, each, X[:1], X[1:2]) for each in (plain, model))
    assert distance(found, expected) <= 2 * FLOAT16  # of two passes


class Two(Mlp):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), super().forward(x * 2)


def test_the_first_gradient_is_zero() -> None:
    plain, model = twins(Two())
    found = []
    for each in (plain, model):
        x = X.clone().requires_grad_()
        first, second = each(x)
        found += torch.autograd.grad(first.square().sum() * 10 + (0 * second).sum(), x)
    assert distance(found[1], found[0]) <= FLOAT16


def test_a_sparse_gradient_comes_in() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.layer = nn.Parameter(torch.rand(6, 4)), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.weight * 2, self.layer(x)

    plain = Table()
    model = amp_graph.convert(copy.deepcopy(plain), policy="float16")
    for each in (plain, model):
        table, _ = each(X)
        F.embedding(torch.tensor([[0, 1, 1]]), table, sparse=True).square().sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    for p, q in ((p.grad, q.grad) for p, q in pairs if q.grad is not None):
        assert distance(p.to_dense(), q.to_dense()) <= FLOAT16


def test_an_input_need_not_live_until_backward() -> None:
    """Only its dtype is asked for, when its gradient goes out."""
    model = amp_graph.convert(nn.Linear(8, 8), policy="float16")
    leaf = torch.randn(4, 8, requires_grad=True)
    model(leaf)
    hidden = leaf * 2
    alive = weakref.ref(hidden)
    result = model(hidden)
    del hidden
    assert alive() is None
    result.sum().backward()
    assert leaf.grad is not None
    weights = model.weight.half().float().sum(0) * 2
    torch.testing.assert_close(leaf.grad, weights.expand(4, 8), rtol=FLOAT16, atol=FLOAT16)


def test_devices_of_one_backward_pass_agree_on_its_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a thread of its own, and gradients may come in on two at once."""
    scale = GraphScale(LossScale(), nn.Linear(2, 2).parameters)
    exposed, both = ExposedScale(scale, CautiousScale()), threading.Barrier(2)

    def chosen_at_once(*given: Any) -> Any:
        factors = bounded(*given)
        both.wait(timeout=30)
        return factors

    monkeypatch.setattr("amp_graph.scaling.cautious_scale.bounded", chosen_at_once)
    monkeypatch.setattr("amp_graph.scaling.cautious_scale.backward_pass", lambda: 7)
    with ThreadPoolExecutor(2) as pool:
        gradients = [torch.full((4,), size) for size in (1.0, 2.0**-10)]
        first, second = pool.map(lambda g: float(exposed.factor(g, create_graph=False)), gradients)
    assert first == second == 1 / float(exposed.inverse(torch.device("cpu")))


def test_gradients_that_were_stored_inside_are_refused() -> None:
    """As by the zero-bubble schedules of `torch.distributed.pipelining`, in two passes."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    model = amp_graph.convert(Mlp(), policy="float16")
    x = X.clone().requires_grad_()
    y = model(x)
    _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], iter(model.parameters()))
    with pytest.raises(amp_graph.AmpGraphError, match="zero-bubble pipelining"):
        stage_backward_weight(iter(model.parameters()), groups)


def test_second_derivatives_that_are_looked_at_after_training() -> None:
    """A Hessian by inputs and its products by parameters: nobody skips a step for them."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    found = []
    for is_converted in (False, True):
        model = copy.deepcopy(plain)
        if is_converted:
            amp_graph.convert(model, policy="float16")
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        x = torch.linspace(-1, 1, 16)[:, None]
        for _ in range(3):
            optimizer.zero_grad()
            (model(x) - x.square()).square().mean().backward()
            optimizer.step()
        model.eval()
        x.requires_grad_()
        (force,) = torch.autograd.grad(200 * model(x).sum(), x, create_graph=True)
        (stiffness,) = torch.autograd.grad(force.sum(), x)
        parameters = [*model.parameters()]
        loss = 200 * model(x).square().sum()
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        ones = [torch.ones_like(p) for p in parameters]
        found.append([stiffness, *torch.autograd.grad(first, parameters, ones)])
    for given, expected in zip(found[1], found[0], strict=True):
        assert distance(given, expected) <= 4 * FLOAT16


@pytest.mark.parametrize(
    ("number", "expected"),
    [(1e-6, 16), (0, 1), (torch.nan, 16), (0.25, 4), (0.3, 2), (-3, 0.25), (torch.inf, 2**-14)],
)
def test_the_chosen_scale_brings_what_comes_in_to_1_but_is_no_larger_than_the_watched_one(
    number: float, expected: float
) -> None:
    gradient = torch.tensor([0.0, number])
    scale, inverse = bounded(torch.tensor(16.0), gradient, 1.0, LossScale())
    assert (float(scale), float(inverse)) == (expected, 1 / expected)


@pytest.mark.parametrize("weight", [60000.0, 2.0**-14 * (1 + 2.0**-10)])
@pytest.mark.parametrize("incoming", [2.0**-8, 2.0**8])
def test_what_float16_holds_of_a_weight_it_holds_of_a_gradient(
    weight: float, incoming: float
) -> None:
    """Be it next to its largest number, or its smallest of all digits."""
    model = amp_graph.convert(nn.Linear(1, 1, bias=False), policy="float16")
    nn.init.constant_(model.weight, weight)
    x = torch.zeros(1, 1, requires_grad=True)
    model(x).backward(torch.full((1, 1), incoming))
    assert x.grad.item() == weight * incoming


def test_a_batch_of_none() -> None:
    model, x = amp_graph.convert(Mlp(), policy="float16"), torch.zeros(0, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x), x, torch.zeros(0, 2))
    assert gradient.shape == x.shape


def test_whose_gradients_are_wanted_but_for_a_step() -> None:
    front, leaf, parameter = Mlp(outputs=4), X.clone().requires_grad_(), nn.Parameter(X.clone())
    amp_graph.convert(front, policy="float16")
    assert are_wanted([leaf]) and are_wanted([parameter, leaf])
    assert are_wanted([leaf * 2 + parameter]), "behind what a script does to it"
    assert are_wanted([front(leaf), leaf * 2])
    assert not are_wanted([parameter]) and not are_wanted([parameter * 2]), "a prompt"
    assert not are_wanted([front(leaf)]) and not are_wanted([front(leaf) * 2]), "of a model"
