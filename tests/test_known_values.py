"""A model may ask what the class of a tensor is called, and name axes in a list of its own kind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.variables.misc import GetAttrVariable
from two_layers import Loop, Speaking, X

import amp_graph
from amp_graph.convert import record_of


class AsksForNames(Speaking):
    """As PEFT does for each weight in DoRA."""

    def speak(self, hidden: Tensor) -> None:
        if type(self.a.weight).__module__.startswith("torchao."):
            raise TypeError
        if hidden.__class__.__name__.lower() != "tensor":
            raise TypeError


@pytest.mark.usefixtures("fresh_dynamo")
def test_names_of_classes_do_not_end_a_graph() -> None:
    own = "call_method" in GetAttrVariable.__dict__
    model = amp_graph.convert(Loop(AsksForNames), policy="bfloat16")
    model(X).sum().backward()
    assert not record_of(model).breaks
    (plan,) = amp_graph.plans(model)
    assert plan.low
    assert ("call_method" in GetAttrVariable.__dict__) == own


class Axes(list[int]):
    """A list of a subclass, such as Keras makes of those that a layer holds."""


class TakesOwnLists(Speaking):
    def __init__(self) -> None:
        super().__init__()
        self.axes = Axes([0, 1])

    def speak(self, hidden: Tensor) -> None:
        if torch.mean(hidden, self.axes, keepdim=True).shape != (1, 1):
            raise TypeError


@pytest.mark.usefixtures("fresh_dynamo")
def test_nor_does_an_operator_that_takes_a_list_of_a_subclass() -> None:
    model = amp_graph.convert(Loop(TakesOwnLists), policy="bfloat16")
    model(X).sum().backward()
    assert not record_of(model).breaks
    model.blocks[0].axes[:] = [1]
    with pytest.raises(TypeError):
        model(X)
