"""Whether a size that varies is a multiple of a number, asked of their quotient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Windowed(nn.Module):
    """Layers over windows of four, as local attention has them, and of each second size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, bool]:
        length, windows = x.size(1), x.size(1) / 4
        if not windows.is_integer():
            x = F.pad(x, (0, 0, 0, math.ceil(windows) * 4 - length))
        within = self.layer(x.reshape(len(x), -1, 32)).reshape(len(x), -1, 8)
        return within[:, :length], (length / x.size(0)).is_integer()


def test_one_graph_for_multiples_and_one_for_others() -> None:
    torch.manual_seed(0)
    model, plain = amp_graph.convert(Windowed(), policy="bfloat16"), Windowed()
    plain.load_state_dict(model.state_dict())
    for rows, length in ((2, 4), (2, 8), (2, 6), (2, 12), (2, 14), (2, 16), (2, 22), (2, 32)):
        x = torch.randn(rows, length, 8)
        found, is_multiple = model(x)
        expected, expected_multiple = plain(x)
        torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)
        assert is_multiple is expected_multiple
        found.sum().backward()
    assert len(amp_graph.plans(model)) == 3


def test_of_two_sizes_that_vary() -> None:
    model, plain = amp_graph.convert(Windowed(), policy="bfloat16"), Windowed()
    for rows, length in ((2, 4), (3, 8), (4, 12), (5, 20), (6, 36), (3, 10), (4, 6), (9, 18)):
        x = torch.randn(rows, length, 8)
        assert model(x)[1] is plain(x)[1] is (length % rows == 0)
    assert len(amp_graph.plans(model)) <= 6


class OfData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        x = self.layer(x)
        return x * 2 if (count.item() / 4).is_integer() else x


def test_a_number_that_depends_on_data_is_asked_by_python() -> None:
    model = amp_graph.convert(OfData(), policy="bfloat16")
    x = torch.randn(2, 4)
    for count in (8, 7, 6, 12):
        expected = model.layer(x) * (1 if count % 4 else 2)
        torch.testing.assert_close(model(x, torch.tensor(count)), expected, rtol=0.1, atol=0.1)
