"""Buffers in whose place a model puts longer ones, as inputs get longer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Biased(nn.Module):
    """Attention with a bias by distance, kept for the longest sequence so far."""

    bias: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("bias", None, persistent=False)

    def distances(self, length: int) -> Tensor:
        if self.bias is None or self.bias.shape[-1] < length:
            places = torch.arange(length)
            bias = -(places[:, None] - places).abs().float()
            self.register_buffer("bias", bias, persistent=False)
        assert self.bias is not None
        return self.bias[:length, :length]

    def forward(self, x: Tensor) -> Any:
        keys = self.layer(x)
        scores = x @ keys.transpose(1, 2) + self.distances(x.shape[1])
        return scores.softmax(-1) @ keys


class InTurn(nn.Module):
    """Behind a break, two of them are captured as calls of one piece of code."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Biased(), Biased()

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.first, self.second):
            torch._dynamo.graph_break()
            x = part(x)
        return x


def test_a_bias_that_grows_with_each_call_is_captured_once() -> None:
    model = amp_graph.convert(Biased(), policy="bfloat16")
    for length in (4, 5, 6, 3):  # none, another, a longer one, and one that is long enough
        model(torch.randn(2, length, 8))
    captured = len(amp_graph.plans(model))
    for length in (*range(7, 24), 9, 64):
        x, plain = torch.randn(2, length, 8), Biased()
        plain.load_state_dict(model.state_dict())
        torch.testing.assert_close(model(x), plain(x), rtol=0.1, atol=0.1)
        assert len(model.bias) >= length
    assert len(amp_graph.plans(model)) == captured == 4


def test_one_that_goes_on_beside_it_in_another_module() -> None:
    model = amp_graph.convert(InTurn(), policy="bfloat16")
    for length in (4, 5, 6, 3, *range(7, 16)):
        model(torch.randn(2, length, 8)).sum().backward()
        assert len(model.first.bias) == len(model.second.bias) >= length
    assert len(amp_graph.plans(model)) <= 8
