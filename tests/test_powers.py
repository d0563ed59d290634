"""Powers of negative numbers, of which FX prints the negative power (pytorch/pytorch#197894), and
powers by Python's function."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from training import distance, twins
from two_layers import BFLOAT16, Two, X

import amp_graph
from amp_graph.convert import record_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Alternates(nn.Module):
    """Signs that alternate, by a tensor and by a size that Dynamo leaves open."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        powers = (-0.5) ** torch.arange(4)
        return self.layer(x) * powers * (-1) ** x.shape[0]


class AsCaptured(Alternates):
    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight.data = self.layer.weight.data.clone()  # not rewritten before 2.14
        return super().forward(x)


@pytest.mark.parametrize("kind", [Alternates, AsCaptured])
@pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning")
def test_they_have_their_signs(kind: type[nn.Module]) -> None:
    plain, model = twins(kind(), "bfloat16")
    for size in (2, 3, 4, 5):
        x = torch.randn(size, 4)
        assert distance(model(x), plain(x)) <= BFLOAT16
    is_rewritten = kind is Alternates or torch.__version__ >= "2.14"
    assert {plan.fallback is None for plan in amp_graph.plans(model)} == {is_rewritten}


class ByFunction(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = h * (pow(h, 2).mean(-1, keepdim=True) + pow(2, -3)).rsqrt()
        return self.b(h) * pow(0.9, h.sigmoid()) * pow(len(x), 2) * pow(5, 2, 3)


def test_a_power_by_function_ends_no_graph() -> None:
    plain, model = twins(ByFunction(), "bfloat16")
    for size in (2, 4, 5):
        x = X[:1].repeat(size, 1)
        assert distance(model(x), plain(x)) <= BFLOAT16
    assert not record_of(model).breaks
