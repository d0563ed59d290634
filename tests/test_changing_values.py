"""Sizes, numbers and names that are others in each call, and what a model is captured for."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X = torch.randn(20, 16)


class Adding(nn.Module):
    def __init__(self, make: Callable[[torch.Size], Tensor]) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(4, 4), make

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.make(x.shape))


SIZES = (2, 3, 4, 3)


@torch.library.custom_op("amp_graph_test::noise", mutates_args=())
def noise(rows: int) -> Tensor:
    return torch.randn(rows, 4)


@noise.register_fake
def _(rows: int) -> Tensor:
    assert isinstance(rows, int), "takes no symbolic sizes"
    return torch.empty(rows, 4)


def test_a_model_that_takes_no_symbolic_sizes_is_captured_at_each() -> None:
    model = amp_graph.convert(Adding(lambda shape: noise(shape[0])))
    for size in SIZES:
        model(torch.randn(size, 4))
    plans = amp_graph.plans(model)
    assert len(plans) == len(set(SIZES))
    assert all(plan.low and not plan.fallback for plan in plans)


@pytest.mark.parametrize("draw", [torch.randn, torch.rand, partial(torch.normal, 0.0, 1.0)])
def test_no_generator_is_none_that_needs_known_sizes(draw: Callable[..., Tensor]) -> None:
    """As `diffusers` draws noise."""
    plain = Adding(lambda shape: draw(shape, generator=None))
    model = amp_graph.convert(copy.deepcopy(plain))
    for size in SIZES:
        x = torch.randn(size, 4)
        results = []
        for each in plain, model:
            torch.manual_seed(0)
            results.append(each(x))
        torch.testing.assert_close(*results, rtol=0.02, atol=0.02)
    assert len(amp_graph.plans(model)) == 2  # of the first size, and of any


SCHEDULES: dict[str, Callable[[float], float]] = {
    "exp": lambda t: math.exp(-t / 3),
    "sigmoid": lambda t: 1 / (1 + math.exp(2 - t)),
    "pow": lambda t: math.pow(0.9, t),
}


@pytest.mark.parametrize("kind", [int, float])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_what_is_scheduled_is_captured_once_more(
    schedule: Callable[[float], float], kind: type
) -> None:
    class Scheduled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.step = nn.Linear(16, 8), kind(1)

        def forward(self, x: Tensor) -> tuple[Tensor, float, Tensor]:
            self.step += 1
            by = schedule(self.step)
            return self.layer(x), by, torch.tensor(by, dtype=torch.float64)

    model = amp_graph.convert(Scheduled())
    for step in range(2, 8):
        _, by, made = model(X)
        assert by == made.item() == pytest.approx(schedule(kind(step)), rel=1e-14)
    assert len(amp_graph.plans(model)) <= 3


LEVELS: dict[str, Callable[[int], int]] = {
    "a ratio": lambda n: int(math.log(n) / math.log(10)),
    "to a base": lambda n: math.ceil(math.log(n, 3)),
    "of a float to a base": lambda n: math.ceil(math.log(n / 2, 3)),
    "log10": lambda n: math.floor(math.log10(n)),
    "exp": lambda n: int(math.exp(math.log(n % 101 + 1))),
    "pow": lambda n: math.ceil(math.pow(10, n % 9)),
}


@pytest.mark.parametrize("levels", LEVELS.values(), ids=LEVELS.keys())
def test_numbers_of_levels_are_exact(levels: Callable[[int], int]) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 8)

        def forward(self, x: Tensor, number: int) -> tuple[Tensor, int]:
            return self.layer(x), levels(number)

    model = amp_graph.convert(Counting())
    for number in (7, 8, 10, 100, 243, 486, 1000, 10**9):
        assert model(X, number)[1] == levels(number)


def test_a_number_without_a_logarithm_is_an_error_that_the_model_may_catch() -> None:
    class Catching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 8)

        def forward(self, x: Tensor, number: float) -> tuple[Tensor, float]:
            try:
                return self.layer(x), math.log(number)
            except ValueError:
                return self.layer(x), math.pow(number, 2.0)

    model = amp_graph.convert(Catching())
    for number in (2.0, 3.0, -1.5, 0.0, 2.5):
        assert model(X, number)[1] == pytest.approx(math.log(number) if number > 0 else number**2)


HANDED: dict[str, Callable[[Any, Tensor], Any]] = {
    "dictionary": lambda batch, y: {"name": batch["name"], "ids": batch["ids"], "y": y},
    "tuple": lambda batch, y: (batch["name"], [batch["ids"], y], y),
    "list": lambda batch, y: [batch["ids"], {1: batch["name"], 2: y}, y],
    "get": lambda batch, y: {"name": batch.get("name"), "ids": batch.get("ids"), "y": y},
    "in": lambda batch, y: [batch["name"], y] if "name" in batch else [y],
}


@pytest.mark.parametrize("hold", HANDED.values(), ids=HANDED.keys())
def test_what_is_only_handed_through_may_change(hold: Callable[[Any, Tensor], Any]) -> None:
    class Handing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 8)

        def forward(self, x: Tensor, batch: dict[str, Any]) -> Any:
            return hold(batch, self.layer(x))

    model = amp_graph.convert(Handing())
    for i in range(4):
        batch = {"name": f"image {i}", "ids": [f"{i}", str(i + 1)]}
        result = model(X, batch)
        y = result["y"] if isinstance(result, dict) else result[-1]
        assert result == hold(batch, y)
    assert len(amp_graph.plans(model)) == 1


def test_a_default_of_a_function_is_seen_to_change() -> None:
    def scaled(x: Tensor, by: float = 1.0, *, shift: float = 0.0) -> Tensor:
        return x * by + shift

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.function = nn.Linear(16, 4), scaled

        def forward(self, x: Tensor) -> Tensor:
            return self.function(self.layer(x))

    plain = Scales()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for by, shift in ((1.0, 0.0), (2.0, 0.0), (2.0, 3.0)):
        scaled.__defaults__, scaled.__kwdefaults__ = (by,), {"shift": shift}
        torch.testing.assert_close(model(X), plain(X), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["buffer", "plain", "parameter"])
def test_a_tensor_of_the_model_is_seen_to_be_of_another_size(name: str) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.plain = nn.Linear(16, 4), torch.ones(2)
            self.register_buffer("buffer", torch.ones(2))
            self.parameter = nn.Parameter(torch.ones(2), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) / getattr(self, name).shape[0]

    plain = Counts()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for size in (2, 2, 3, 5, 2):
        for each in (plain, model):
            getattr(each, name).data = torch.ones(size)  # the tensor is the same
        torch.testing.assert_close(model(X), plain(X), rtol=0.02, atol=0.02)
