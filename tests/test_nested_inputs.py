"""Nested tensors of the strided layout that come where ordinary tensors were captured."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import amp_graph

DENSE = torch.linspace(-1, 1, 32).reshape(4, 8)

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning"),
    pytest.mark.usefixtures("fresh_dynamo"),
]


class OfContainers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, given: dict[str, list[Tensor]]) -> Tensor:
        return self.layer(given["x"][0])


def as_nested(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([x[:3], x])


def same(x: Tensor) -> Any:
    return x


def in_containers(x: Tensor) -> Any:
    return {"x": [x]}


@pytest.mark.parametrize(
    ("plain", "given"),
    [
        (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), same),
        (OfContainers(), in_containers),
    ],
    ids=["argument", "in containers"],
)
def test_a_strided_nested_tensor_after_an_ordinary_one_is_left_to_autocast(
    plain: nn.Module, given: Any
) -> None:
    """PyTorch's guard of an ordinary tensor would end the process."""
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    model(given(DENSE))
    for _ in range(2):
        result, expected = (m(given(as_nested(DENSE))) for m in (model, plain))
        assert result.is_nested and result.dtype is torch.float32
        torch.testing.assert_close(
            result.to_padded_tensor(0.0), expected.to_padded_tensor(0.0), rtol=2e-2, atol=2e-2
        )
    torch.testing.assert_close(model(given(DENSE)), plain(given(DENSE)), rtol=2e-2, atol=2e-2)


class Asked(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.about: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.about.append(func)
        return func(*args, **(kwargs or {}))


def test_a_mode_does_not_see_that_tensors_are_asked_whether_they_are_nested() -> None:
    model = amp_graph.convert(nn.Linear(8, 4), policy="bfloat16")
    with Asked() as asked:
        model(DENSE)
        asked.about.clear()
        model(DENSE)
    assert torch.Tensor.is_nested.__get__ not in asked.about  # type: ignore[attr-defined]
