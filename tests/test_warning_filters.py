"""Models that filter warnings for a while: a filter of their own does not end a graph."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from training import assert_same_gradients
from two_layers import Two, X

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SET: dict[str, Callable[[], None]] = {
    "simple": lambda: warnings.simplefilter("ignore"),
    "by category": lambda: warnings.simplefilter("ignore", category=UserWarning),
    "by text": lambda: warnings.filterwarnings("ignore", message="not to be"),
}


class Silent(Two):
    """Two breaks in the block if `breaks`."""

    def __init__(self, set_filter: Callable[[], None], breaks: bool) -> None:
        super().__init__()
        self.set_filter, self.breaks = set_filter, breaks

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        with warnings.catch_warnings():
            self.set_filter()
            warnings.warn("not to be shown", stacklevel=1)
            if self.breaks:
                speak()
            hidden = self.b(hidden)
            if self.breaks:
                speak()
            warnings.warn("not to be shown either", stacklevel=1)
        return hidden


@torch.compiler.disable
def speak() -> None:
    warnings.warn("not to be shown between graphs", stacklevel=1)


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("kind", SET)
def test_a_filter(kind: str, breaks: bool) -> None:
    plain = Silent(SET[kind], breaks)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    before = [*warnings.filters]
    plain(X).sum().backward()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for _ in range(2):
            model.zero_grad()
            model(X).sum().backward()
    assert not shown
    assert warnings.filters == before
    assert [plan.fallback for plan in amp_graph.plans(model)] == [None] * (1 + breaks)
    assert_same_gradients(model, plain, 0.05)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=UserWarning)
            return self.lstm(x)[0]


def test_a_layer_in_the_block() -> None:
    model = amp_graph.convert(Recurrent(), policy="bfloat16")
    model(torch.randn(3, 2, 8))
    (plan,) = amp_graph.plans(model)
    assert plan.fallback is None and "lstm" in plan.low


class Raises(Two):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                speak()
            except UserWarning:
                hidden = hidden + 1
        return self.b(hidden)


class Keeps(Two):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        with warnings.catch_warnings(record=True) as kept:
            warnings.simplefilter("always")
            speak()
        return self.b(hidden) * len(kept)


@pytest.mark.parametrize("make", [Raises, Keeps])
def test_what_a_block_does_with_warnings_is_done(make: type[Two]) -> None:
    plain = make()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for _ in range(2):
        torch.testing.assert_close(model(X), plain(X), rtol=0.05, atol=0.05)


class IgnoresOldWays(Two):
    """By a filter that equals one which is there while it is captured."""

    def forward(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.warn("an old way", DeprecationWarning, stacklevel=1)
            return self.b(self.a(x))


@pytest.mark.filterwarnings("error::DeprecationWarning")
def test_a_filter_of_the_model_s_that_equals_another() -> None:
    plain = IgnoresOldWays()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for _ in range(2):
        torch.testing.assert_close(model(X), plain(X), rtol=0.05, atol=0.05)
