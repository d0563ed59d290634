"""What captures of a model count, and when they are too many."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import get_compilation_metrics

import amp_graph
from amp_graph import ConversionWarning
from amp_graph.capture.budget import MAX_CAPTURES, REPAID_BY, SOME

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X = torch.randn(20, 16)


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(16, 8), []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(self.seen))
        return self.layer(x)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_that_changes_at_each_call_is_not_captured_for_ever(dtype: str) -> None:
    plain = Remembering()
    model = amp_graph.convert(copy.deepcopy(plain), policy=dtype)
    changes = r"before the last it was `len\(module.seen\) == \d+` \(test_budget.py:\d+ in f"
    with pytest.warns(ConversionWarning, match="captured anew again and again.*" + changes):
        for _ in range(MAX_CAPTURES):
            model(X).sum().backward()
    captured = len(amp_graph.plans(model))
    for _ in range(3):
        for m in (plain, model):
            m.zero_grad()
            m(X).sum().backward()
        torch.testing.assert_close(
            model.layer.weight.grad, plain.layer.weight.grad, atol=0.1, rtol=0
        )
    assert len(amp_graph.plans(model)) == captured <= MAX_CAPTURES + 1
    assert len(model.seen) == MAX_CAPTURES + 3


class Chosen(nn.Module):
    """Layers that are chosen by the caller, as in one-shot architecture search."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, choice: tuple[int, ...]) -> Tensor:
        for i in choice:
            x = self.layers[i](x)
        return x


def test_captures_that_take_long_are_told_of_before_they_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("amp_graph.capture.budget.LONG", 1e-6)
    model = amp_graph.convert(Remembering(), policy="bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(SOME - 1):
            model(X)
    told = rf"anew in call after call, for \d+ s so far.*`len\(module.seen\) == {SOME - 2}`"
    with pytest.warns(ConversionWarning, match=told):
        model(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        model(X)


def test_calls_in_between_that_are_not_captured_do_not_make_it_go_on_for_ever() -> None:
    model = amp_graph.convert(Chosen(), policy="bfloat16")
    choices = list(itertools.product(range(3), repeat=4))
    with pytest.warns(ConversionWarning, match="captured anew again and again"):
        for choice in choices[: 2 * MAX_CAPTURES]:
            model(X, choice)
            model(X, choices[0])
    captured = len(amp_graph.plans(model))
    for choice in choices[40:44]:
        model(X, choice)
    assert len(amp_graph.plans(model)) == captured


def test_what_is_all_of_its_call_counts_in_full_however_small() -> None:
    """As the trees of a recursive network do, whose first was a large one."""
    model = amp_graph.convert(Chosen(), policy="bfloat16")
    choices = list(itertools.product(range(3), repeat=3))
    model(X, choices[0] * 8)
    with pytest.warns(ConversionWarning, match="captured anew again and again"):
        for choice in choices[: MAX_CAPTURES - 1]:
            model(X, choice)


def test_captures_that_take_long_count_as_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amp_graph.capture.budget.SLOW", 1e-6)
    model = amp_graph.convert(Chosen(), policy="bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X, (0,))  # but for the first
    with pytest.warns(ConversionWarning, match="captured anew again and again"):
        model(X, (1,))


def test_captures_that_pay_are_forgiven() -> None:
    model = amp_graph.convert(Chosen(), policy="bfloat16")
    for choice in itertools.islice(itertools.product(range(3), repeat=4), MAX_CAPTURES + 2):
        for _ in range(1 + REPAID_BY):
            model(X, choice)
    assert {plan.fallback for plan in amp_graph.plans(model)} == {None}


def test_who_asked_is_not_told_to_be_this_package() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.shape[0] > 5 else x

    model = amp_graph.convert(nn.Sequential(nn.Linear(8, 8), Branches()), policy="bfloat16")
    for n in (3, 4, 9):
        model(torch.randn(n, 8))
    told = get_compilation_metrics()[-1].recompile_reason
    assert "test_budget.py" in told and "amp_graph/" not in told
