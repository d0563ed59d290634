"""Models that run a part of themselves under autocast: it ends with the part, whatever happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_graph

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Casts(nn.Module):
    """Under autocast of its own in part, in which an operator runs that nothing else has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            h = self.layer(x).index_select(0, index)
        return self.layer(h.float())


def test_a_fallback_in_the_first_run_is_under_the_modes_of_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The emitted graph fails inside of autocast, which its end would have left."""
    model = amp_graph.convert(Casts(), policy="bfloat16")

    def failing(*args: Any) -> Tensor:
        assert torch.is_autocast_enabled("cpu")
        raise RuntimeError("planted")

    planted = {torch.ops.aten.index_select.default: failing}
    monkeypatch.setattr("amp_graph.backend.eager.binding", planted.get)
    with pytest.warns(amp_graph.ConversionWarning, match="planted"):
        assert model(X, torch.tensor([0, 1])).dtype is torch.float32
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16


def test_an_error_inside_of_autocast_leaves_it() -> None:
    model = amp_graph.convert(Casts(), policy="bfloat16")
    model(X, torch.tensor([0, 1]))
    with pytest.raises(IndexError):
        model(X, torch.tensor([0, 99]))
    assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu"):
        assert nn.Linear(8, 8)(X).dtype is torch.bfloat16
    assert nn.Linear(8, 8)(X).dtype is torch.float32
