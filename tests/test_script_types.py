"""A model may ask of which class a value is as TorchScript has it asked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.variables import SkipFunctionVariable
from two_layers import Loop, Speaking, X

import amp_graph
from amp_graph.convert import record_of


class AsksForClasses(Speaking):
    """As MONAI's U-Nets do for each skip connection."""

    def speak(self, hidden: Tensor) -> None:
        if not torch.jit.isinstance(hidden, Tensor):
            raise TypeError
        if torch.jit.isinstance(None, Tensor) or not torch.jit.isinstance(1, (Tensor, int)):
            raise TypeError


class AsksForContents(Speaking):
    def speak(self, hidden: Tensor) -> None:
        if not torch.jit.isinstance([hidden], list[Tensor]):
            raise TypeError


@pytest.mark.usefixtures("fresh_dynamo")
def test_questions_for_classes_do_not_end_a_graph() -> None:
    own = SkipFunctionVariable.call_function
    model = amp_graph.convert(Loop(AsksForClasses), policy="bfloat16")
    model(X).sum().backward()
    assert not record_of(model).breaks
    (plan,) = amp_graph.plans(model)
    assert plan.low
    assert SkipFunctionVariable.call_function is own


@pytest.mark.usefixtures("fresh_dynamo")
def test_questions_for_what_a_container_holds_do() -> None:
    model = amp_graph.convert(Loop(AsksForContents), policy="bfloat16")
    model(X).sum().backward()
    assert record_of(model).breaks


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_container_without_contents_is_refused_as_ever() -> None:
    class Wrong(Speaking):
        def speak(self, hidden: Tensor) -> None:
            torch.jit.isinstance([hidden], list)

    model = amp_graph.convert(Loop(Wrong), policy="bfloat16")
    with pytest.raises(RuntimeError, match="contained type"):
        model(X)
