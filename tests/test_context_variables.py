"""A model may go by the value of a context variable."""

from __future__ import annotations

import copy
from contextvars import ContextVar

import pytest
import torch
from torch import Tensor
from two_layers import Loop, Speaking, X

import amp_graph
from amp_graph.convert import record_of

IS_DOUBLED: ContextVar[bool] = ContextVar("is_doubled", default=False)
STEP: ContextVar[float] = ContextVar("step")
UNSET: ContextVar[int] = ContextVar("unset")
NAMES: ContextVar[list[str]] = ContextVar("names")


class Asks(Speaking):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if IS_DOUBLED.get() else 1)

    def speak(self, hidden: Tensor) -> None: ...


@pytest.mark.usefixtures("fresh_dynamo")
def test_its_value_is_followed_without_a_break() -> None:
    plain, model = Loop(Asks), amp_graph.convert(Loop(Asks), policy="bfloat16")
    for value in (False, True, False):
        token = IS_DOUBLED.set(value)
        torch.testing.assert_close(model(X), plain(X), rtol=0.05, atol=0.05)
        IS_DOUBLED.reset(token)
    torch.testing.assert_close(model(X), plain(X), rtol=0.05, atol=0.05)
    assert not record_of(model).breaks
    assert len(amp_graph.plans(model)) == 2


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("error::amp_graph.ConversionWarning")
def test_a_number_may_be_another_in_each_call() -> None:
    class Scheduled(Speaking):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * STEP.get()

        def speak(self, hidden: Tensor) -> None: ...

    plain = Scheduled()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for step in range(20):
        STEP.set(step / 20)
        torch.testing.assert_close(model(X), plain(X), rtol=0.05, atol=0.05)
    assert len(amp_graph.plans(model)) <= 3


@pytest.mark.usefixtures("fresh_dynamo")
def test_one_without_a_value_raises_as_ever() -> None:
    class AsksInVain(Speaking):
        def speak(self, hidden: Tensor) -> None:
            UNSET.get()

    model = amp_graph.convert(Loop(AsksInVain), policy="bfloat16")
    with pytest.raises(LookupError):
        model(X)
    UNSET.set(1)
    assert model(X).shape == X.shape


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_list_in_one_is_no_constant() -> None:
    class AsksForList(Speaking):
        def speak(self, hidden: Tensor) -> None:
            if NAMES.get() == ["b"]:
                raise ValueError("renamed")

    NAMES.set(["a"])
    model = amp_graph.convert(AsksForList(), policy="bfloat16")
    model(X)
    assert any(plan.low for plan in amp_graph.plans(model))
    NAMES.get()[0] = "b"
    with pytest.raises(ValueError, match="renamed"):
        model(X)
