"""Models that are captured again and again, or not at all, and what is said of them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters

import amp_graph
from amp_graph import ConversionWarning
from amp_graph.capture.budget import MAX_CAPTURES

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X = torch.randn(20, 16)


class Forcing(nn.Module):
    """Teacher forcing in a loop over time, at which Dynamo leaves the whole frame to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layer(x) if random.random() < 0.5 else self.layer(x).tanh()
        return x


class Trying(Forcing):
    """A break inside of `try`, with the same effect."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.layer(x) if random.random() < 0.5 else self.layer(x).tanh()
        except ValueError:
            return x


@pytest.mark.parametrize("make", [Forcing, Trying])
def test_why_nothing_is_captured_is_said(make: type[nn.Module]) -> None:
    """Of each model, though Dynamo itself says it once for a class."""
    where = r"nothing is captured .*test_captured_anew.py:\d+, in forward: "
    for _ in range(2):
        model = amp_graph.convert(make())
        with pytest.warns(ConversionWarning, match=where):
            model(X)
        assert "in forward: " in str(amp_graph.explain(model))
        assert "in forward: " in amp_graph.plans(model)[0].fallback


class LeavesEarly(nn.Module):
    """By an exception, in each call, as feature extractors do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        self.found(hidden)
        return self.second(hidden)

    @torch._dynamo.disable
    def found(self, hidden: torch.Tensor) -> None:
        raise StopIteration(hidden)


@pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning")
def test_a_model_that_raises_in_each_call_is_not_captured_for_ever() -> None:
    model = amp_graph.convert(LeavesEarly())
    for _ in range(MAX_CAPTURES + 4):
        with pytest.raises(StopIteration):
            model(torch.randn(2, 4))
    assert len(amp_graph.plans(model)) <= MAX_CAPTURES + 1


class Checking(nn.Module):
    """Refuses some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, x: Tensor, is_good: bool) -> Tensor:
        y = self.layer(x)
        if not is_good:
            raise ValueError("a bad batch")
        return y


def test_calls_that_raise_now_and_then_are_not_captured_for_ever() -> None:
    model = amp_graph.convert(Checking())
    begun = []
    with pytest.warns(ConversionWarning, match="captured anew again and again"):
        for _ in range(2 * MAX_CAPTURES):
            model(X, True)
            with pytest.raises(ValueError, match="a bad batch"):
                model(X, False)
            begun.append(counters["frames"]["total"])
    assert begun[-1] == begun[-2] > begun[0]


class Bound(nn.Module):
    """Its `forward` is made anew each time that the class is asked for it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def times(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return self.layer(x) * factor

    forward = functools.partialmethod(times, factor=2.0)


def test_a_forward_that_is_a_partial_method_is_captured_once() -> None:
    model = amp_graph.convert(Bound())
    for _ in range(3):
        model(torch.randn(2, 4))
    assert len(amp_graph.plans(model)) == 1


def test_the_shapes_of_another_model_make_none_dynamic() -> None:
    for model, shape in (nn.Linear(4, 4), (2, 4)), (nn.Conv2d(1, 4, 3), (2, 1, 8, 8)):
        amp_graph.convert(model)(torch.randn(shape))
        (plan,) = amp_graph.plans(model)
        sizes = [s for f in plan.facts.values() for t in f.tensors for s in t.shape]
        assert sizes and all(isinstance(size, int) for size in sizes)


def assign(kind: type[nn.Module], forward: Any) -> None:
    kind.forward = forward


def reload(kind: type[nn.Module], forward: Any) -> None:
    """As IPython's autoreload does."""
    kind.forward.__code__ = forward.__code__


@pytest.mark.parametrize("change", [assign, reload])
@pytest.mark.parametrize("is_part", [False, True])
def test_a_class_gets_another_forward(is_part: bool, change: Callable[..., None]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return amp_graph.convert(nn.Sequential(Net()) if is_part else Net(), policy="bfloat16")

    model, x = make(), torch.randn(4, 8)
    y = model(x)
    change(Net, lambda self, x: self.layer(x) + 100)
    for called in (model, make()):  # the second is alike
        torch.testing.assert_close(called(x), y + 100, rtol=0.01, atol=0)


def test_a_part_whose_graph_is_edited() -> None:
    """A GraphModule, of a class that belongs to `torch.fx`."""
    inner = fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    model = amp_graph.convert(nn.Sequential(inner, nn.Identity()), policy="bfloat16")
    x = torch.randn(4, 8)
    y = model(x)
    (output,) = inner.graph.find_nodes(op="output")
    with inner.graph.inserting_before(output):
        output.args = (inner.graph.call_function(torch.add, (output.args[0], 100)),)
    inner.recompile()
    torch.testing.assert_close(model(x), y + 100, rtol=0.01, atol=0)


class Behind(nn.Module):
    """Has its code captured for itself, as other models of the class have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(16, 8), []

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        self.seen.append(len(self.seen))
        return self.layer(x)


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="Dynamo hands over what it has in a linked list"
)
def test_what_was_captured_of_another_model_is_no_change() -> None:
    for dtype in ("bfloat16", "float16"):
        model = amp_graph.convert(Behind(), policy=dtype)
        calls = vars(model)["_call_impl"]._calls["_call_impl"]
        model(X)
        assert not calls._budget.changed
        model(X)
        assert "self.seen" in calls._budget.changed
