"""Memory written by another name: through `.data`, a view, or what `detach` gave."""

from __future__ import annotations

import pytest
import torch
from graphs import rewritten
from torch import Tensor, nn
from training import assert_same_gradients, distance, twins
from two_layers import BFLOAT16, POLICIES, Two, X

import amp_graph
from amp_graph import Policy
from amp_graph.capture.retrace import trace

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Writes(nn.Module):
    """Parameters and buffers written behind autograd's back: clamps, averages, codebooks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.average: Tensor
        self.register_buffer("average", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        self.average.data.mul_(0.9)
        self.layer.weight.data.clamp_(-0.1, 0.1)
        y = self.layer(x) * self.average
        self.average.data.add_(y.data.mean(0), alpha=0.01)  # after it was saved for backward
        return y


class WritesActivations(Two):
    """Views, with and without `detach`, of a result that the next product reads."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        view = h.view(-1)
        with torch.no_grad():
            h.detach().t().mul_(3.0)
            h.data[0].fill_(2.0)
            part = view.detach()[3:]
        part.add_(x.exp().mean())
        return self.b(h) * view.mean()


@pytest.mark.parametrize("kind", [Writes, WritesActivations])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_what_is_written_through_data_stays(kind: type[nn.Module], policy: Policy) -> None:
    plain, model = twins(kind(), policy)
    for _ in range(3):
        for each in (plain, model):
            each.zero_grad()
            each(X).square().mean().backward()
        assert_same_gradients(model, plain, BFLOAT16)
    for ours, theirs in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert distance(ours, theirs) <= BFLOAT16
    assert any(plan.converts for plan in amp_graph.plans(model))


def test_what_is_written_into_a_view_of_attention_is_seen() -> None:
    def function(q, k, v, mask):
        result = nn.functional.scaled_dot_product_attention(q, k, v, mask)
        result.detach().transpose(1, 2).exp_()
        return result @ result.transpose(-2, -1)

    args = [torch.randn(2, 4, 5, 8, requires_grad=True) for _ in range(2)]
    args += [torch.randn(2, 4, 5, 8), torch.randn(5, 5, requires_grad=True)]
    result = rewritten(trace(function, args), Policy("bfloat16"))
    assert not result.nodes("scaled_dot_product_attention")
    found, wanted = result.module(*args), function(*args)
    assert (found - wanted).norm() <= 0.02 * wanted.norm()
