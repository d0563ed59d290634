"""`retain_grad()` in the forward of a model whose features are looked at (Grad-CAM, saliency)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import relu
from training import assert_same_gradients, distance, twins
from two_layers import BFLOAT16, POLICIES, Two, X

import amp_graph
from amp_graph import Policy

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Looked(Two):
    """At the features, in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        self.h = self.a(x)
        self.h.retain_grad()
        return self.b(torch.tanh(self.h))


class AtLast(Two):
    """Where something was made of them already."""

    def forward(self, x: Tensor) -> Tensor:
        self.h = self.a(x)
        u = self.b(torch.tanh(self.h))
        self.h.retain_grad()
        return u + self.h.mean()


class AtAnInput(Two):
    def forward(self, x: Tensor) -> Tensor:
        self.h = x
        x.retain_grad()
        return self.b(torch.tanh(self.a(x)))


class IfRecorded(Two):
    def forward(self, x: Tensor) -> Tensor:
        self.h = self.a(x)
        if self.h.requires_grad:
            self.h.retain_grad()
        return self.b(torch.tanh(self.h))


class Overwritten(Two):
    """What is retained is the gradient of what they are afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        self.h = self.a(x)
        self.h.retain_grad()
        return self.b(relu(self.h, inplace=True))


class OverwrittenInPart(Two):
    def forward(self, x: Tensor) -> Tensor:
        self.h = self.a(x)
        part = self.h[:, :4]
        self.h.retain_grad()
        part.mul_(2)
        return self.b(torch.tanh(self.h))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize(
    "kind", [Looked, AtLast, AtAnInput, IfRecorded, Overwritten, OverwrittenInPart]
)
def test_gradients_are_retained_and_the_rest_is_captured(kind: type[Two], policy: Policy) -> None:
    plain, model = twins(kind(), policy)
    for _ in range(2):
        for each in (plain, model):
            each.zero_grad()
            each(X.clone().requires_grad_() * 1).square().mean().backward()
        assert distance(model.h.grad, plain.h.grad) <= BFLOAT16
        assert_same_gradients(model, plain, BFLOAT16)
    plans = amp_graph.plans(model)
    assert any(plan.low for plan in plans) and not any(plan.fallback for plan in plans)


@torch.no_grad()
def test_nothing_is_retained_where_nothing_is_recorded() -> None:
    plain, model = twins(IfRecorded(), Policy("bfloat16"))
    assert distance(model(X), plain(X)) <= BFLOAT16 and len(amp_graph.plans(model)) == 1
    with pytest.raises(RuntimeError, match="can't retain_grad"):
        twins(Looked(), Policy("bfloat16"))[1](X)
