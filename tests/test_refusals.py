"""Code between graphs that refuses low precision, by whatever error, runs in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import amp_graph
from amp_graph import ConversionWarning

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Strict(nn.Module):
    """Asks before it computes, as libraries with kernels of their own do; a loop that breaks."""

    error: type[Exception] = ValueError
    known = (torch.float32,)

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: Tensor, limit: float = 1e9) -> Tensor:
        self.calls += 1
        for _ in range(2):
            h = self.layer(x)
            if h.mean().item() > 1e9:
                break
            if h.dtype not in self.known or x.abs().max().item() > limit:
                raise self.error("no such numbers")
            x = x + h
        return x


class Unknown(Exception):
    """A library's own."""


@pytest.mark.parametrize("error", [ValueError, AssertionError, Unknown])
def test_code_that_refuses_low_precision_runs_in_float32(error: type[Exception]) -> None:
    model = Strict()
    model.error = error
    amp_graph.convert(model)
    with pytest.warns(ConversionWarning, match=f"autocast fails .{error.__name__}"):
        for _ in range(3):
            assert model(torch.ones(2, 8)).dtype is torch.float32


def test_a_class_of_errors_that_is_the_user_s_own_is_not_asked_for_twice() -> None:
    model, x, calls = amp_graph.convert(Strict()), torch.ones(2, 8), []
    model.error, model.known = Unknown, (torch.float32, torch.bfloat16)
    for _ in range(2):
        model(x)
    for _ in range(3):
        before = model.calls
        with pytest.raises(Unknown):
            model(x, limit=0.5)
        calls.append(model.calls - before)
    assert calls == [2, 1, 1]
