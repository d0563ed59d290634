"""Custom autograd functions, and checkpoints, that hand on or write into what they were given."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint
from training import assert_same_gradients, distance, twins
from two_layers import BFLOAT16, POLICIES, Reverse, Two, X

import amp_graph
from amp_graph import Policy
from amp_graph.convert import record_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Exp(Function):
    """As in PyTorch's documentation. The gradient and what was saved are alike, and are not one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * y


class TwoResults(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x.exp(), x.sin()

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return a * x.exp() + b * x.cos()


class InPlaceExp(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.exp_()
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


class Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.factor = factor
        return x * y * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        x, y = ctx.saved_tensors
        return gradient * y * ctx.factor, None, gradient * x.cos() * ctx.factor


class Detached(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class SavesItsResult(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(Exp.apply(self.a(x)))


class SavesItsInput(Two):
    def forward(self, x: Tensor) -> Tensor:
        e, s = TwoResults.apply(self.a(x))
        return self.b(e) + s


class GivenTwice(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(Product.apply(h, 0.5, h))


class WrittenBeforeItIsReversed(Two):
    """By an activation in place, as the features of many networks end."""

    def forward(self, x: Tensor) -> Tensor:
        features = self.a(x).relu_()
        return features.square().mean() + self.b(Reverse.apply(features))


class WritesItsInput(Two):
    """The input is read again by the name it had."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        before = h.sin().detach()
        InPlaceExp.apply(h)
        return h.sin() + before + self.b(h)


class WritesItsInputAndGoesOn(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = InPlaceExp.apply(self.a(x) * 1)
        return self.b(h)


class ResultIsWritten(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        y = Detached.apply(h)
        with torch.no_grad():
            y.exp_()
        return self.b(h) + self.b(y)


class ViewFromCheckpointIsWritten(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = checkpoint(lambda t: t.view(8, 4), h, use_reentrant=False)
        with torch.no_grad():
            y.exp_()
        return self.b(h)


CONVERTED = [SavesItsResult, SavesItsInput, GivenTwice, WrittenBeforeItIsReversed]
UNDER_AUTOCAST = [WritesItsInputAndGoesOn, ResultIsWritten]
if torch.__version__ >= "2.13":  # with backend="eager", Dynamo 2.11 gives it another gradient
    UNDER_AUTOCAST.append(WritesItsInput)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("kind", [*CONVERTED, *UNDER_AUTOCAST, ViewFromCheckpointIsWritten])
def test_results_and_gradients(kind: type[nn.Module], policy: Policy) -> None:
    plain, model = twins(kind(), policy)
    results = [each(X) for each in (plain, model)]
    assert distance(results[1], results[0]) <= BFLOAT16
    for result in results:
        result.square().mean().backward()
    assert_same_gradients(model, plain, BFLOAT16)
    for plan in amp_graph.plans(model):
        assert plan.converts and (kind not in CONVERTED or plan.fallback is None)
    assert kind not in CONVERTED or not record_of(model).breaks


class CrossEntropy(Function):
    """Backward writes into memory of its own; forward saves an input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor) -> Tensor:
        p = torch.softmax(x, -1)
        ctx.save_for_backward(p, target)
        return -p.gather(1, target[:, None]).log().mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        p, target = ctx.saved_tensors
        d = p.clone()
        d.scatter_add_(1, target[:, None], -torch.ones_like(target[:, None], dtype=d.dtype))
        return gradient * d / len(target), None


class Loss(Two):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return CrossEntropy.apply(self.b(self.a(x).mul_(0.5)), target)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_what_is_saved_is_not_handed_on(policy: Policy) -> None:
    plain, model = twins(Loss(), policy)
    target = torch.tensor([0, 3, 4, 7])
    for each in (plain, model):
        each(X, target).backward()
    assert_same_gradients(model, plain, BFLOAT16)
    assert [plan.fallback for plan in amp_graph.plans(model)] == [None]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("kind", CONVERTED)
def test_second_derivatives(kind: type[nn.Module], policy: Policy) -> None:
    plain, model = twins(kind(), policy)
    for each in (plain, model):
        x = X.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(each(x).square().mean(), x, create_graph=True)
        gradient.square().sum().backward()
    assert_same_gradients(model, plain, 2 * BFLOAT16)
    assert [plan.fallback for plan in amp_graph.plans(model)] == [None]


class WritesWhatWasSaved(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).cumsum(-1)  # float32, so that it is not a cast of it that is saved
        e, s = TwoResults.apply(h)
        h.add_(1)
        return self.b(e) + s


def test_what_was_saved_may_not_be_written_to() -> None:
    plain, model = twins(WritesWhatWasSaved(), Policy("bfloat16"))
    for each in (plain, model):
        loss = each(X).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert amp_graph.plans(model)[0].converts


@pytest.mark.parametrize("kind", CONVERTED)
def test_what_was_saved_is_let_go_at_once(kind: type[nn.Module]) -> None:
    """It does not wait for the garbage collector."""
    model, x = amp_graph.convert(kind()), torch.randn(33, 8)

    def alive() -> int:
        model(x).sum().backward()
        shapes = [t.shape for t in gc.get_objects() if type(t) is Tensor]
        return sum(shape == x.shape for shape in shapes)

    alive(), gc.collect(), gc.disable()
    try:
        assert len({alive() for _ in range(4)}) == 1
    finally:
        gc.enable()


class SlopeByInput(Two):
    """A slope that is taken between two graphs, while Dynamo captures what is called."""

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_(True)
        (slope,) = torch.autograd.grad(Exp.apply(self.b(self.a(x))).sum(), x, create_graph=True)
        return self.a(slope)


def test_a_backward_pass_between_graphs_is_not_captured() -> None:
    model = amp_graph.convert(SlopeByInput(), policy="bfloat16")
    for _ in range(2):
        model(X.clone()).sum().backward()
    (told,) = record_of(model).breaks
    assert "a gradient is taken there" in told


class Recorded(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            derivative = x.cos()
        return gradient * derivative


class WithRecorded(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(Recorded.apply(self.a(x)))


def test_a_second_derivative_is_right_or_an_error() -> None:
    model = amp_graph.convert(WithRecorded())
    x = X.clone().requires_grad_()
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match="a second derivative was asked for"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
