"""Calls that raise, as a server may meet them: what was captured for good ones stays."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable

import pytest
import torch
from nets import low_share
from torch import Tensor, nn
from torch._dynamo.eval_frame import cached_backends
from two_layers import Packed

import amp_graph
from amp_graph.capture.budget import MAX_CAPTURES, REPAID_BY

GOOD, WRONG = torch.randn(4, 8), torch.randn(4, 5)
WIDTH = GOOD.shape[1]

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


class Checks(Net):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != WIDTH:
            raise ValueError("the wrong width")
        return super().forward(x)


class Breaks(Net):
    def forward(self, x: Tensor) -> Tensor:
        print(end="")
        return super().forward(x)


class ChecksBehindBreak(Checks):
    def forward(self, x: Tensor) -> Tensor:
        print(end="")
        return self.checked(x)

    def checked(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class AsksForNumber(Net):
    """One graph; two, if Dynamo is told to break at numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.sum().item()


KINDS = [Net, Checks, Breaks, ChecksBehindBreak, AsksForNumber]
ERRORS = (RuntimeError, ValueError)


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_captured_stays(kind: type[Net], is_first: bool) -> None:
    """`is_first`: the first call of all raises."""
    expected = amp_graph.convert(kind())
    expected(GOOD)
    torch._dynamo.reset()
    model = amp_graph.convert(kind())
    if not is_first:
        model(GOOD)
    for _ in range(3):
        with pytest.raises(ERRORS):
            model(WRONG)
        for _ in range(2):
            model(GOOD)
    plans = amp_graph.plans(model)
    assert len(plans) <= len(amp_graph.plans(expected))
    assert not any(plan.fallback for plan in plans)
    assert low_share(model, GOOD) == 1


def test_what_was_captured_between_code_under_autocast_stays() -> None:
    model = amp_graph.convert(Packed())
    counts = []
    for _ in range(5):
        for _ in range(3):
            model(GOOD)
        with pytest.raises(RuntimeError):
            model(GOOD.double())
        counts.append(len(amp_graph.plans(model)))
    assert counts[1:] == counts[1:2] * 4
    assert low_share(model, GOOD) == 1


@pytest.mark.parametrize("kind", [Exception, BaseException])
def test_hooks_may_end_a_call_early(kind: type[BaseException]) -> None:
    """As those do that are after the features of a layer."""
    stopping = type("Stopping", (kind,), {})

    def stop(*_: object) -> None:
        raise stopping

    model = amp_graph.convert(Net())
    for _ in range(3):
        handle = model.first.register_forward_hook(stop)
        with pytest.raises(stopping):
            model(GOOD)
        handle.remove()
        for _ in range(2):
            model(GOOD)
    plans = amp_graph.plans(model)
    assert not any(plan.fallback for plan in plans) and len(plans) <= 3
    assert low_share(model, GOOD) == 1


def test_of_those_that_raise_some_may_be_many() -> None:
    model = amp_graph.convert(Net())
    for _ in range(40):
        with pytest.raises(RuntimeError):
            model(WRONG)
        for _ in range(REPAID_BY):
            model(GOOD)
    (plan,) = amp_graph.plans(model)
    assert plan.fallback is None


def test_nothing_is_kept_of_those_that_raise() -> None:
    model = amp_graph.convert(Net(), policy="bfloat16")
    kept = []
    for _ in range(8):
        with pytest.raises(RuntimeError):
            model(WRONG)
        gc.collect()  # the error refers to what raised it, and is referred to
        model(GOOD)
        kept.append(len(cached_backends))
    assert kept[-1] <= kept[3]


def test_a_model_whose_calls_all_raise_is_no_longer_captured() -> None:
    model = amp_graph.convert(Net())
    with pytest.warns(amp_graph.ConversionWarning, match="one call after another raised"):
        for _ in range(MAX_CAPTURES):
            with pytest.raises(RuntimeError):
                model(WRONG)
    assert low_share(model, GOOD) == 1


class Catching(nn.Module):
    def __init__(self, asks: str) -> None:
        super().__init__()
        self.layer, self.asks = nn.Linear(8, 8), asks

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        try:
            h = h.mean(2) if self.asks == "an axis" else torch.linalg.cholesky(-h @ h.T)
        except (IndexError, torch.linalg.LinAlgError):
            return h * 2
        return h


@pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning")
@pytest.mark.parametrize("asks", ["an axis", "a factorization"])
def test_a_model_may_catch_what_it_raises(asks: str) -> None:
    model, x = amp_graph.convert(Catching(asks)), torch.randn(4, 8)
    for _ in range(3):
        torch.testing.assert_close(model(x), Catching.forward(model, x), rtol=0.02, atol=0.02)


def test_what_a_model_does_not_catch_is_its_own() -> None:
    class Stop(Exception):
        pass

    seen = []

    def stop(*_: object) -> None:
        seen.append(1)
        raise Stop

    model, x = amp_graph.convert(nn.Sequential(nn.Linear(8, 8), nn.ReLU())), torch.randn(4, 8)
    for _ in range(2):
        handle = model[0].register_forward_hook(stop)
        with pytest.raises(Stop):
            model(x)
        handle.remove()
    assert len(seen) == 2  # the hook ran once for each call
    assert low_share(model, x) == 1


class SetsItselfUp(Net):
    """In its first call, by code that cannot be captured: behind a break Dynamo sees other code,
    which fails."""

    def __init__(self, every_call: bool = False):
        super().__init__()
        self.is_set_up, self.every_call = False, every_call

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set_up or self.every_call:
            torch._dynamo.graph_break()
            with torch.no_grad():
                self.first.bias -= x.mean()
            if torch.compiler.is_compiling():
                x = x + torch.ones(3)
            self.is_set_up = True
        return super().forward(x)


@pytest.mark.filterwarnings("error::amp_graph.ConversionWarning")
def test_a_first_call_that_sets_the_model_up_is_no_verdict() -> None:
    model = amp_graph.convert(SetsItselfUp(), policy="bfloat16")
    first, second = model(GOOD), model(GOOD)
    assert all(plan.fallback is None for plan in amp_graph.plans(model))
    assert low_share(model, GOOD) == 1
    torch.testing.assert_close(second, first, rtol=0.05, atol=0.05)


def test_one_that_always_fails_is_left_to_its_own_code_from_the_second_call_on() -> None:
    model = amp_graph.convert(SetsItselfUp(every_call=True), policy="bfloat16")
    with pytest.warns(amp_graph.ConversionWarning, match="SetsItselfUp runs under") as told:
        for _ in range(4):
            model(GOOD)
    assert len(told) == 1
    fallbacks = [str(plan.fallback) for plan in amp_graph.plans(model)]
    assert sum("not captured (" in fallback for fallback in fallbacks) == 1


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("make", [Holding, lambda: Holding().layers], ids=["holds", "layers"])
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
def test_an_argument_that_an_operator_refuses_is_no_verdict(
    make: Callable[[], nn.Module], is_first: bool
) -> None:
    """Dynamo has a graph end at the call of the layers then, and guards no argument of it."""
    model, alike = (amp_graph.convert(make(), policy="bfloat16") for _ in range(2))
    if not is_first:
        model(GOOD)
        alike(GOOD)
    with pytest.raises(TypeError, match="must be Tensor"):
        model("text")
    with warnings.catch_warnings():
        warnings.simplefilter("error", amp_graph.ConversionWarning)
        for each in (model, alike, amp_graph.convert(make(), policy="bfloat16")):
            assert low_share(each, GOOD) == 1
