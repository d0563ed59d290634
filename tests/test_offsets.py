"""Values that lose what they are for when they are rounded: single numbers that many are measured
by, and what a small low value is added to."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

import amp_graph
from amp_graph.levels import LEVELS
from amp_graph.passes.analysis import AnalyzedGraph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class WithAProduct(nn.Module):
    """Without one there is nothing low that the rest could follow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.mean = nn.Parameter(273.0 + torch.randn(8, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.measured(x)

    def measured(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Peak(WithAProduct):
    """Series scaled to [-1, 1] by the largest value (Gramian angular fields)."""

    def measured(self, x: Tensor) -> Tensor:
        return torch.acos(x / x.abs().max())


class Prior(WithAProduct):
    """The distance of a distribution from one with numbers of its own."""

    def measured(self, x: Tensor) -> Tensor:
        return kl_divergence(Normal(self.mean, 1.0), Normal(273.15, 10.0)).mean()


class OneOfSeveral(WithAProduct):
    def measured(self, x: Tensor) -> Tensor:
        return torch.exp(torch.stack([x.mean(), x.min(), x.max()])[2] - x)


class Chosen(WithAProduct):
    def measured(self, x: Tensor) -> Tensor:
        return torch.exp(torch.where(x.sum() > 0, x.max(), x.min()) - x)


CASES = [(kind, level) for kind in (Peak, Prior, OneOfSeveral, Chosen) for level in LEVELS]
CASES.remove((Prior, "max"))  # which rounds parameters


@pytest.mark.parametrize(("kind", "level"), CASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_single_number_that_float32_arithmetic_reads_is_not_rounded(kind, dtype, level) -> None:
    torch.manual_seed(0)
    plain, x = kind(), torch.randn(4, 8)
    model = copy.deepcopy(plain)
    amp_graph.convert(model, policy=amp_graph.Policy(dtype, level=level))
    torch.testing.assert_close(model(x)[1], plain(x)[1], rtol=1e-6, atol=1e-6)


class Forecast(nn.Module):
    """What is to come, by how far it is from the last value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        last = x[:, -1:]
        return self.layer(x - last) + last


class Boxes(Forecast):
    """Areas of boxes that were moved a little."""

    def forward(self, x: Tensor) -> Tensor:
        moved = x + self.layer(x - 300)
        return (moved[:, :4] * moved[:, 4:]).sum(1)


class Steps(Forecast):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + 0.1 * self.layer(x - 300)
        return x


class Denormalised(Forecast):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((8,), 300.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer((x - self.mean) / 5) * 5 + self.mean


@pytest.fixture
def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where streams are narrowed in bfloat16."""
    monkeypatch.setattr(AnalyzedGraph, "narrows_streams", property(lambda graph: True))


@pytest.mark.usefixtures("as_on_gpus")
@pytest.mark.parametrize("kind", [Forecast, Boxes, Steps, Denormalised])
def test_where_something_was_keeps_its_digits_when_it_moves(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    plain, x = kind(), 300 + torch.randn(4, 8)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = plain(x)
    ours, theirs = ((found - plain(x)).abs().max() for found in (model(x), under_autocast))
    assert ours <= 1.25 * theirs


class Stream(nn.Module):
    """A stream that begins with an input, read by norms and products, and scores with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer, self.head = nn.GroupNorm(1, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.layer(self.norm(x))
        scores = self.layer(x) + mask
        return self.head(self.norm(x)) + torch.softmax(scores, -1)


@pytest.mark.usefixtures("as_on_gpus")
def test_a_stream_that_norms_read_and_masked_scores_are_narrowed() -> None:
    model = amp_graph.convert(Stream(), policy="bfloat16")
    model(torch.randn(4, 8), torch.zeros(4, 8))
    (plan,) = amp_graph.plans(model)
    sums = [name for name, f in plan.facts.items() if f.op == "aten.add.Tensor"]
    assert set(sums[:2]) <= plan.low
