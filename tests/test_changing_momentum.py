"""Batch norm whose momentum changes, or depends on data, is captured once."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

import amp_graph
from amp_graph.convert import record_of

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("error::amp_graph.ConversionWarning"),
]
BATCHES = [torch.randn(6, 4, generator=torch.Generator().manual_seed(n)) + n for n in range(6)]


class Net(nn.Module):
    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4, momentum=momentum), nn.Linear(4, 2)
        self.last = nn.BatchNorm1d(2, momentum=momentum, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.head(self.norm(x)))


def halve(net: Net) -> None:
    for norm in (net.norm, net.last):
        norm.momentum *= 0.5  # type: ignore[operator]


def assert_alike(model: nn.Module, plain: nn.Module) -> None:
    """Statistics of the inputs are in float32, so that they are the same up to rounding."""
    theirs = plain.state_dict()
    for name, value in model.state_dict().items():
        near = 1e-5 if "norm.running" in name else 0.02
        torch.testing.assert_close(value, theirs[name], rtol=near, atol=near)


@pytest.mark.parametrize(
    ("momentum", "change"), [(None, lambda net: None), (0.5, halve)], ids=["none", "halved"]
)
def test_it_is_what_batch_norm_makes(momentum: float | None, change: Callable[[Net], None]) -> None:
    torch.manual_seed(0)
    plain = Net(momentum)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for x in BATCHES:
        ours, theirs = model(x), plain(x)
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)
        for net, result in ((model, ours), (plain, theirs)):
            net.zero_grad()
            result.sin().sum().backward()
            change(net)
        assert_alike(model, plain)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert (p.grad - q.grad).norm() < 0.05 * q.grad.norm() + 0.05
    assert len(amp_graph.plans(model)) <= 2
    assert not record_of(model).breaks
    model.eval(), plain.eval()
    torch.testing.assert_close(model(x), plain(x), rtol=0.05, atol=0.05)


def test_statistics_of_averaged_weights_are_one_graph() -> None:
    torch.manual_seed(0)
    plain = Net(0.1)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    averages = AveragedModel(model), AveragedModel(plain)
    for average in averages:
        update_bn(BATCHES, average)
    assert_alike(*averages)
    assert len(amp_graph.plans(averages[0].module)) == 1
    assert not record_of(averages[0].module).breaks


class ByHand(nn.Module):
    """Its own statistics, with a momentum that changes."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.head, self.calls, self.writes = nn.Linear(4, 2), 0, writes
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        momentum, held = 1 / (1 + self.calls), {"running_var": self.variance, "eps": 1e-3}
        return self.head(
            F.batch_norm(x, self.mean, momentum=momentum, training=self.writes, **held)
        )


@pytest.mark.parametrize("writes", [True, False])
def test_a_call_by_hand(writes: bool) -> None:
    torch.manual_seed(0)
    plain = ByHand(writes)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for x in BATCHES:
        torch.testing.assert_close(model(x), plain(x), rtol=0.05, atol=0.05)
    torch.testing.assert_close(model.mean, plain.mean)
    torch.testing.assert_close(model.variance, plain.variance)
    assert not writes or len(amp_graph.plans(model)) <= 2


def test_one_value_for_each_channel_is_an_error_as_ever() -> None:
    model = amp_graph.convert(Net(None), policy="bfloat16")
    model(BATCHES[0])
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(BATCHES[0][:1])
