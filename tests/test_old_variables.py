"""`Variable` in a model, as in scripts of PyTorch's first years, and other classes that say
themselves what their instances are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import Variable
from training import assert_same_gradients, twins
from two_layers import BFLOAT16, Two, X

from amp_graph.convert import record_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Remembers(Two):
    """A recurrent network that cuts its history off."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.memory is None:
            self.memory = Variable(torch.zeros(x.size(0), 8), requires_grad=False)
        h = self.a(Variable(x)).tanh() + self.memory + self.b(self.repackaged(self.a(x)))
        self.memory = Variable(h.data)
        return h

    def repackaged(self, h: Tensor | tuple[Tensor, ...]) -> Tensor:
        if isinstance(h, Variable):
            return Variable(h)
        raise TypeError("no variable")


def test_a_variable_is_a_detached_tensor() -> None:
    plain, model = twins(Remembers(), "bfloat16")
    for _ in range(3):
        for each in (plain, model):
            each.zero_grad()
            each(X).square().sum().backward()
        assert_same_gradients(model, plain, within=BFLOAT16)
    torch.testing.assert_close(model.memory, plain.memory, rtol=0.03, atol=0.03)
    assert not record_of(model).breaks and not model.memory.requires_grad


class Leaf(Two):
    def forward(self, x: Tensor) -> Tensor:
        leaf = Variable(self.a(x), requires_grad=True)
        self.slope = torch.autograd.grad(self.b(leaf).sum(), leaf)[0]
        return self.b(leaf)


def test_one_that_is_to_require_a_gradient_does() -> None:
    plain, model = twins(Leaf(), "bfloat16")
    torch.testing.assert_close(model(X), plain(X), rtol=0.03, atol=0.03)
    torch.testing.assert_close(model.slope, plain.slope, rtol=0.03, atol=0.03)


class OfRank(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, Tensor) and value.dim() == cls.rank


class Matrix(metaclass=OfRank):
    rank = 2


class Volume(metaclass=OfRank):
    rank = 3


class OfSign(type):
    def __instancecheck__(cls, value: Tensor) -> bool:
        return bool(value.sum() > 0)


class Positive(metaclass=OfSign):
    pass


@pytest.mark.parametrize("asked", [Matrix, Volume, (list, Matrix), (Volume, Tensor), Positive])
def test_a_class_that_knows_its_instances_is_asked(asked: type | tuple[type, ...]) -> None:
    class Asks(Two):
        def forward(self, x: Tensor) -> tuple[Tensor, bool]:
            h = self.a(x)
            return h, isinstance(h, asked)

    plain, model = twins(Asks(), "bfloat16")
    assert model(X)[1] is plain(X)[1]
    assert asked is Positive or not record_of(model).breaks
