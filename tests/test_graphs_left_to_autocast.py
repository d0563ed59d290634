"""Graphs that are captured and cannot be retraced: they run under autocast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import amp_graph
from amp_graph import ConversionWarning

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Transformed(nn.Module):
    """A graph with a derivative inside is not retraced, but left to autocast."""

    def __init__(self, ends_in: str) -> None:
        super().__init__()
        self.layer, self.ends_in = nn.Linear(4, 4), ends_in

    def forward(self, x: Tensor) -> Tensor:
        doubled = torch.func.grad(lambda rows: rows.square().sum())(x)
        if self.ends_in == "einsum":
            return torch.einsum("bnd,bmd->bnm", self.layer(x), doubled)
        return torch.lerp(doubled, self.layer(x), 0.5)  # autocast knows no lerp


def test_a_graph_left_to_autocast_is_told_of() -> None:
    model = amp_graph.convert(Transformed("einsum"), policy="bfloat16")
    with pytest.warns(
        ConversionWarning, match="graph 0 of Transformed runs under autocast: not retraced"
    ):
        model(torch.randn(2, 3, 4))


@pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("ends_in", ["einsum", "lerp"])
def test_a_graph_left_to_autocast_runs(dtype: str, around: type, ends_in: str) -> None:
    model, x = amp_graph.convert(Transformed(ends_in), policy=dtype), torch.randn(2, 3, 4)
    with around():
        for _ in range(3):
            torch.testing.assert_close(
                model(x), Transformed.forward(model, x), rtol=0.05, atol=0.05
            )
    (plan,) = amp_graph.plans(model)
    assert plan.autocast == (ends_in == "einsum")
    assert ("autocast fails (RuntimeError" in plan.fallback) == (ends_in == "lerp")


class Masked(nn.Module):
    """Fills its scores with the lowest number of their dtype, which is another under autocast."""

    def __init__(self, fill: str) -> None:
        super().__init__()
        self.layer, self.fill = nn.Linear(4, 4), fill

    def forward(self, x: Tensor) -> Tensor:
        doubled = torch.func.grad(lambda rows: rows.square().sum())(x)
        scores = self.layer(x) @ doubled.transpose(1, 2)
        lowest, mask = torch.finfo(scores.dtype).min, torch.ones(3, 3).triu(1).bool()
        if self.fill == "function":
            scores = torch.masked_fill(scores, mask, value=lowest)
        else:
            scores = getattr(scores, self.fill)(mask, lowest)
        return scores.softmax(-1) @ doubled


@pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("fill", ["masked_fill", "masked_fill_", "function"])
def test_a_mask_is_filled_with_what_scores_can_hold(fill: str, dtype: str) -> None:
    model, x = amp_graph.convert(Masked(fill), policy=dtype), torch.randn(2, 3, 4)
    for _ in range(3):
        torch.testing.assert_close(model(x), Masked.forward(model, x), rtol=0.05, atol=0.05)
    (plan,) = amp_graph.plans(model)
    assert plan.autocast and "autocast fails" not in plan.fallback
