"""Models that turn recording by autograd off or on, and whose graphs end meanwhile: the mode is the
plain model's, in the model and after its call, and so is every gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from training import assert_same_gradients
from two_layers import BFLOAT16, POLICIES, Two, X

import amp_graph
from amp_graph import Policy

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def end_graph() -> None:
    print(end="")


class OffAcross(Two):
    def forward(self, x: Tensor) -> Tensor:
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        h = self.a(x)
        end_graph()
        torch.set_grad_enabled(before)
        return self.b(x) + h


class RecordedBefore(Two):
    """What leaves the first graph was recorded, though it ends without recording."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        torch.set_grad_enabled(False)
        h = self.b(x)
        end_graph()
        torch.set_grad_enabled(True)
        return self.b(y) + h


class OnAcross(Two):
    def forward(self, x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        h = self.a(x)
        torch.set_grad_enabled(True)
        y = self.b(x)
        end_graph()
        return y + h


class StaysOff(Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        torch.set_grad_enabled(False)
        return y


class StaysOn(Two):
    def forward(self, x: Tensor) -> Tensor:
        torch.set_grad_enabled(True)
        return self.a(x)


class ContextAcross(Two):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.a(x)
            end_graph()
            h = self.a(h)
        return self.b(x) + h


MODELS = [OffAcross, RecordedBefore, OnAcross, StaysOff, StaysOn, ContextAcross]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("is_called_on", [True, False], ids=["called on", "called off"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_mode_is_the_plain_model_s(
    kind: type[nn.Module], is_called_on: bool, policy: Policy
) -> None:
    plain = kind()
    model = amp_graph.convert(copy.deepcopy(plain), policy=policy)
    for _ in range(2):
        seen = []
        for each in (plain, model):
            each.zero_grad()
            try:
                torch.set_grad_enabled(is_called_on)
                y = each(X)
                seen.append((torch.is_grad_enabled(), y.requires_grad))
            finally:
                torch.set_grad_enabled(True)
            if y.requires_grad:
                y.square().mean().backward()
        assert seen[0] == seen[1]
        assert_same_gradients(model, plain, BFLOAT16)


class Decorated(Two):
    """As pyro.infer.Predictive does; Dynamo fails at it after it has turned recording off."""

    def chosen(self) -> nn.Module:
        end_graph()
        return self.a

    def forward(self, x: Tensor) -> Tensor:
        return torch.no_grad()(self.chosen())(x) + self.b(x)


@pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning")
def test_a_capture_that_fails_leaves_the_mode_as_it_was() -> None:
    model = amp_graph.convert(Decorated(), policy="bfloat16")
    assert model(X).requires_grad
    assert torch.is_grad_enabled()
