"""Tensors made of lists of Python numbers, which are others in each call: lengths, samples."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_graph
from amp_graph.dynamo_changes.listed_numbers import MANY

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X = torch.randn(4, 8)
MAKE: dict[str, Callable[[Any], Tensor]] = {
    "tensor": torch.tensor,
    "as_tensor": torch.as_tensor,
    "as_tensor with a dtype": lambda numbers: torch.as_tensor(numbers, dtype=torch.float64),
    "asarray": lambda numbers: torch.asarray(numbers, dtype=torch.float16),
    "Tensor": torch.Tensor,
    "FloatTensor": torch.FloatTensor,
    "LongTensor": torch.LongTensor,
    "IntTensor of pairs": lambda numbers: torch.IntTensor([numbers, (1, 2, 3)]),
}


class Net(nn.Module):
    def __init__(self, make: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(8, 8), make

    def forward(self, x: Tensor, numbers: Any) -> tuple[Tensor, Tensor]:
        x = self.layer(x)
        made = self.make(numbers)
        return self.layer(x * made.float().mean()), made


def lists(kind: type, length: int) -> list[list[Any]]:
    drawn = random.Random(0)
    return [[kind(drawn.uniform(1, 1e6)) for _ in range(length)] for _ in range(6)]


@pytest.mark.parametrize("kind", [int, float])
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE.keys())
def test_numbers_that_change_are_captured_once_more(
    make: Callable[[Any], Tensor], kind: type
) -> None:
    model = amp_graph.convert(Net(make), policy="bfloat16")
    for numbers in lists(kind, 3):
        result, made = model(X, numbers)
        assert made.dtype is make(numbers).dtype
        torch.testing.assert_close(made, make(numbers))
        result.sum().backward()
    assert len(amp_graph.plans(model)) == 2


def written(x: Tensor, numbers: list[int]) -> Tensor:
    x = x.clone()
    x[torch.arange(3), numbers] = 2.0
    x[:, [n - 1 for n in numbers]] += 1
    return x


PLACES: dict[str, Callable[[Tensor, list[int]], Tensor]] = {
    "alone": lambda x, numbers: x.T[numbers],
    "in a tuple": lambda x, numbers: x.T[numbers,],
    "behind": lambda x, numbers: x[..., [n - 1 for n in numbers], None],
    "beside a range": lambda x, numbers: x[range(len(numbers)), numbers],
    "beside another": lambda x, numbers: x[[n % 4 for n in numbers], numbers],
    "beside one": lambda x, numbers: x[numbers[0] % 4, numbers],
    "beside a number in a tensor": lambda x, numbers: x[torch.tensor(1), numbers],
    "to write to": written,
}


class Places(nn.Module):
    def __init__(self, read: Callable[[Tensor, list[int]], Tensor]) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(8, 8), read

    def forward(self, x: Tensor, numbers: list[int]) -> Tensor:
        return self.read(self.layer(x), numbers)


@pytest.mark.parametrize("read", PLACES.values(), ids=PLACES)
def test_lists_of_indices_are_captured_once_more(read: Any) -> None:
    plain = Places(read)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    drawn = random.Random(0)
    for _ in range(6):
        numbers = [drawn.randint(2, 7) for _ in range(3)]
        result, expected = model(X, numbers), plain(X, numbers)
        torch.testing.assert_close(result, expected, rtol=0.02, atol=0.02)
        result.sum().backward()
    assert len(amp_graph.plans(model)) == 2


@pytest.mark.parametrize("make", [torch.tensor, torch.LongTensor])
def test_python_makes_tensors_of_many_numbers(make: Callable[[Any], Tensor]) -> None:
    model = amp_graph.convert(Net(make), policy="bfloat16")
    counts = []
    for numbers in lists(int, MANY + 50):
        result, made = model(X, numbers)
        assert torch.equal(made, make(numbers))
        result.sum().backward()
        counts.append(len(amp_graph.plans(model)))
    assert counts[-1] == counts[-3]
    assert all(len(plan.facts) < MANY for plan in amp_graph.plans(model))


def test_numbers_that_do_not_change_end_no_graph() -> None:
    model = amp_graph.convert(Net(torch.tensor), policy="bfloat16")
    (numbers, *_) = lists(int, MANY + 50)
    for _ in range(3):
        model(X, numbers)
    assert len(amp_graph.plans(model)) == 1


SIZED: dict[str, Callable[[Tensor], Tensor]] = {
    "a size": lambda x: torch.FloatTensor(x.size()).normal_(),
    "a shape": lambda x: torch.Tensor(x.shape).normal_(),
    "a part of one": lambda x: torch.Tensor(x.shape[:1]).normal_(),
    "integers": lambda x: torch.LongTensor(x.size()).fill_(5),
    "one number": lambda x: torch.FloatTensor(x.size(0)).uniform_(),
    "two numbers": lambda x: torch.Tensor(x.size(0), 3).normal_(),
    "a size as data": lambda x: torch.as_tensor(x.size()),
    "a list of sizes as data": lambda x: torch.LongTensor([x.size(0), x.size(1)]),
    "new": lambda x: x.data.new(x.size()).normal_(),
}


@pytest.mark.parametrize("make", SIZED.values(), ids=SIZED.keys())
def test_sizes_are_no_data(make: Callable[[Tensor], Tensor]) -> None:
    """As older VAEs draw noise. Dynamo makes a tensor of a size's numbers."""

    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.layer(x)
            return y, make(y)

    model = amp_graph.convert(Sized(), policy="bfloat16")
    for rows in (4, 5, 6, 3):
        x = torch.randn(rows, 8)
        torch.manual_seed(0)
        _, made = model(x)
        drawn = torch.rand(1)
        torch.manual_seed(0)
        expected = make(x)
        assert made.dtype is expected.dtype
        assert torch.equal(made, expected)
        assert torch.equal(drawn, torch.rand(1))
    assert len(amp_graph.plans(model)) == 2
