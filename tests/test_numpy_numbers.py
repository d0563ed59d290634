"""Numbers that NumPy makes of sizes and settings, in a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.variables import ConstantVariable
from training import twins
from two_layers import Two, X

import amp_graph
from amp_graph.convert import record_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Using(Two):
    """What a function makes of the hidden values, which is free to return no tensor."""

    def __init__(self, use: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        h = self.a(x)
        return self.b(h), self.use(h)


def taken_as(found: Any) -> int:
    kinds = (torch.is_tensor(found), isinstance(found, float), isinstance(found, np.integer))
    return sum(2**n for n, is_one in enumerate(kinds) if is_one)


USES: dict[str, Callable[[Tensor], Any]] = {
    "number in the last step": lambda h: 5 * np.ceil(np.log(h.shape[-1])).astype("int").item(),
    "ceil of Python's": lambda h: math.ceil(np.log2(h.shape[-1])),
    "integer": lambda h: int(np.prod(h.shape)) + round(np.sqrt(h.shape[-1])),
    "size in a list": lambda h: h.view([np.prod(h.shape[:1]), -1]),
    "size in a list of a function": lambda h: torch.reshape(h, [np.prod(h.shape[:1]), -1]),
    "size of a new one": lambda h: torch.zeros([np.prod(h.shape[:1]), 2]),
    "size": lambda h: h.reshape(np.prod(h.shape)),
    "range": lambda h: list(range(np.prod(h.shape[:1]))),
    "branch": lambda h: h * 2 if np.log(h.shape[-1]) > 0.5 else h,
    "clip": lambda h: h[:, : np.clip(20, 1, 3)],
    "whole numbers times": lambda h: torch.arange(3) * np.sqrt(2.0),
    "times whole numbers": lambda h: np.float32(0.5) + np.sqrt(2.0) * torch.arange(3),
    "tensor of the size": lambda h: torch.tensor([np.log(2.0)]),
    "like others": lambda h: h.new_tensor(np.prod([2, 3])),
    "float": lambda h: taken_as(np.log(2.0)),
    "whole number": lambda h: taken_as(np.max([3, 4])),
    "array": lambda h: taken_as(np.arange(3)),
    "known to be one": lambda h: np.isscalar(3.0),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_a_number_of_numpy_is_what_it_is_without_capture(
    use: Callable[[Tensor], Any], caplog: pytest.LogCaptureFixture
) -> None:
    plain, model = twins(Using(use), "bfloat16")
    _, expected = plain(X)
    _, found = model(X)
    assert type(found) is type(expected)
    if isinstance(found, Tensor):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.2)
    else:
        assert found == expected
    assert not record_of(model).breaks and not caplog.records
    (plan,) = amp_graph.plans(model)
    assert not any(
        fact.op in ("aten.log", "aten.ceil", "aten.prod") for fact in plan.facts.values()
    )


class Holding(Two):
    """Holds numbers of NumPy's, as audio codecs do: `self.hop_length = np.prod(rates)`."""

    def __init__(self, use: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.use, self.hop, self.is_wide = use, np.prod([2, 3]), np.bool_(True)
        self.scale = {"of": np.float64(0.5), "narrow": np.float32(0.25)}

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        h = self.a(x)
        return self.b(h), self.use(self, h)


HELD: dict[str, Callable[[Any, Tensor], Any]] = {
    "padding": lambda m, h: nn.functional.pad(h, (0, math.ceil(20 / m.hop) * m.hop - 20)),
    "times whole numbers": lambda m, h: torch.arange(3) * m.scale["of"],
    "times narrow": lambda m, h: m.scale["narrow"] * torch.arange(3),
    "range": lambda m, h: sum(h[0, i] for i in range(m.hop)),
    "branch": lambda m, h: h * 2 if m.hop > 5 else h,
    "truth": lambda m, h: h * 2 if m.is_wide else h,
    "untruth": lambda m, h: h * 2 if not m.is_wide else h,
    "a number's truth": lambda m, h: h * 2 if m.hop and True else h,
    "view": lambda m, h: h[:1].repeat(m.hop, 1).view(m.hop, -1),
    "slice": lambda m, h: h[:, : m.hop // 2],
    "division": lambda m, h: h / m.scale["of"],
    "tensor of its type": lambda m, h: torch.as_tensor(m.scale["of"]),
    "function": lambda m, h: torch.full((2,), m.scale["of"]),
    "argument by name": lambda m, h: torch.add(h, h, alpha=m.scale["narrow"]),
    "size of the batch": lambda m, h: h[:: max(1, len(h) // m.hop)],
}


@pytest.mark.parametrize("use", HELD.values(), ids=HELD.keys())
def test_a_number_of_numpy_that_a_model_holds(
    use: Callable[[Any, Tensor], Any], caplog: pytest.LogCaptureFixture
) -> None:
    plain, model = twins(Holding(use), "bfloat16")
    for rows in (len(X), 2, 3):
        _, expected = plain(X[:rows])
        _, found = model(X[:rows])
        assert type(found) is type(expected) and found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.2)
    assert not record_of(model).breaks and not caplog.records
    assert len(amp_graph.plans(model)) <= 2
    # Dynamo's own constants, which are those of all models, do not come from this one.
    assert not any(ConstantVariable.create(number).source for number in (True, False, 6))


def test_a_held_number_that_changes_is_captured_twice() -> None:
    plain, model = twins(Holding(lambda m, h: h * m.scale["of"]), "bfloat16")
    for number in (0.5, 2.0, 3.0, 0.5, 7.0):
        for m in (plain, model):
            m.scale["of"] = np.float64(number)
        torch.testing.assert_close(model(X)[1], plain(X)[1], rtol=0.05, atol=0.2)
    assert len(amp_graph.plans(model)) == 2  # held, and then as a tensor


def test_sizes_that_vary_are_captured_as_before() -> None:
    plain, model = twins(Using(lambda h: h[: int(np.prod(h.shape[:1]))]), "bfloat16")
    for rows in (2, 3, 5, 7):
        x = torch.randn(rows, X.shape[-1])
        torch.testing.assert_close(model(x), plain(x), rtol=0.05, atol=0.2)
