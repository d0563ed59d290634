"""Memory written by another name: through `.data`, a view, or what `detach` gave."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graphs import BFLOAT16 as IN_BFLOAT16
from graphs import rewritten
from torch import Tensor, nn
from training import assert_same_gradients, distance, twins
from two_layers import BFLOAT16, POLICIES, Two, X

import amp_graph
from amp_graph import Policy
from amp_graph.capture.retrace import trace

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
IGNORING_AUTOCAST = pytest.mark.filterwarnings("ignore:graph 0 runs under autocast")


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


class Replaces(Two):
    """As in MoCo: the averaged weights are put in place of the old ones."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.b.weight.data = self.b.weight.data * 0.9 + self.a.weight.data * 0.1
            key = self.b(x)
        return self.a(x) * key


class Borrows(Two):
    """Reads a weight normalised, and then as it was."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.a.weight.data
        self.a.weight.data = nn.functional.normalize(weight)
        y = self.b(self.a(x))
        self.a.weight.data = weight
        return y + self.a(x)


@pytest.mark.parametrize("kind", [Writes, WritesActivations, Replaces])
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


@IGNORING_AUTOCAST
def test_a_graph_under_autocast_reads_weights_as_they_are() -> None:
    """Autocast would hand out the copy that it made of the first."""
    plain, model = twins(Borrows(), "bfloat16")
    assert distance(model(X), plain(X)) <= BFLOAT16
    for each in (model, plain):
        each(X).square().mean().backward()
    assert_same_gradients(model, plain, BFLOAT16)
    (plan,) = amp_graph.plans(model)
    assert plan.autocast == (torch.__version__ < "2.15")


def same(weight: Tensor) -> Tensor:
    return weight


def conditionally_moved(weight: Tensor) -> Tensor:
    return weight if weight.device == X.device else weight.to(X.device)


def moved(weight: Tensor) -> Tensor:
    return weight.to(X.device).float().contiguous()


@pytest.mark.parametrize("function", [same, conditionally_moved, moved])
def test_a_tensor_put_where_it_is_costs_no_graph(function: Callable[[Tensor], Tensor]) -> None:
    """As the losses of pytorch-metric-learning do with their weights."""

    class Assigns(Two):
        def forward(self, x: Tensor) -> Tensor:
            self.a.weight.data = function(self.a.weight.data)
            hidden = self.a(x)
            self.a.weight.data = function(self.a.weight.data)
            return self.b(hidden) + self.a(x)

    plain, model = twins(Assigns(), "bfloat16")
    for each in (plain, model):
        each(X).square().mean().backward()
    assert_same_gradients(model, plain, BFLOAT16)
    (plan,) = amp_graph.plans(model)
    assert plan.fallback is None and plan.converts


@IGNORING_AUTOCAST
def test_a_tensor_put_back_is_another_assignment() -> None:
    class PutsBack(Two):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.a.weight.data
            self.a.weight.data = weight * 2
            self.a.weight.data = weight
            return self.a(x)

    plain, model = twins(PutsBack(), "bfloat16")
    for _ in range(2):
        assert distance(model(X), plain(X)) <= BFLOAT16
    assert distance(model.a.weight, plain.a.weight) == 0


def test_what_is_written_into_a_view_of_attention_is_seen() -> None:
    def function(q, k, v, mask):
        result = nn.functional.scaled_dot_product_attention(q, k, v, mask)
        result.detach().transpose(1, 2).exp_()
        return result @ result.transpose(-2, -1)

    args = [torch.randn(2, 4, 5, 8, requires_grad=True) for _ in range(2)]
    args += [torch.randn(2, 4, 5, 8), torch.randn(5, 5, requires_grad=True)]
    result = rewritten(trace(function, args), IN_BFLOAT16)
    assert not result.nodes("scaled_dot_product_attention")
    found, wanted = result.module(*args), function(*args)
    assert (found - wanted).norm() <= 0.02 * wanted.norm()
