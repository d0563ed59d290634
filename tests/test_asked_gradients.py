"""Values that a model tells to require a gradient stay in its graph where nobody can tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import assert_same_gradients, distance, twins
from two_layers import BFLOAT16, POLICIES, Two, X

import amp_graph
from amp_graph import Policy
from amp_graph.convert import record_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Frozen(Two):
    """Trains its second layer alone, as an adapter, with the first one's result asked by a call."""

    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        self.ask(h)
        return checkpoint(self.b, h, use_reentrant=True)

    def ask(self, h: Tensor) -> None:
        h.requires_grad_(True)


class Assigned(Frozen):
    def ask(self, h: Tensor) -> None:
        h.requires_grad = True


class BiasOfBlock(Two):
    """Made inside of the first checkpoint and handed on to the next one (T5)."""

    def block(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if bias is None:
            bias = torch.zeros(x.shape)
            bias.requires_grad = True
        return self.a(x).tanh() + bias, bias

    def forward(self, x: Tensor) -> Tensor:
        bias = None
        for _ in range(2):
            x, bias = checkpoint(self.block, x, bias, use_reentrant=False)
        return self.b(x)


class ViewOfInput(Two):
    """A view of the input, as the feature encoder of Wav2Vec2."""

    def forward(self, x: Tensor) -> Tensor:
        view = x[:, None]
        view.requires_grad = True
        return self.b(self.a(view))[:, 0]


class NewSum(Two):
    """Losses of layers are added to a new zero, as by the routing transformer."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        loss = torch.tensor(0.0, requires_grad=True) + h.square().mean()
        other = torch.zeros(1, requires_grad=True)
        return self.b(h), loss + other.sum()


class AsItWas(Two):
    """Nothing changes, as in the penalty of AdaLoRA."""

    def forward(self, x: Tensor) -> Tensor:
        identity = torch.eye(8)
        identity.requires_grad = False
        self.a.weight.requires_grad = True
        return self.b(self.a(x) @ identity)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo 2.11 ends graphs at any")
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("kind", [Frozen, Assigned, BiasOfBlock, ViewOfInput, NewSum, AsItWas])
def test_they_do_not_end_the_graph(kind: type[nn.Module], policy: Policy) -> None:
    plain, model = twins(kind(), policy)
    for each in (plain, model):
        outputs = each(X.clone())
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.stack([y.square().mean() for y in outputs]).sum().backward()
    assert_same_gradients(model, plain, BFLOAT16)
    assert not record_of(model).breaks
    (plan,) = amp_graph.plans(model)
    assert any(part.low for part in plan.parts()) and not plan.fallback


class Leaves(Frozen):
    """The value itself is a result."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        self.ask(h)
        return h, self.b(h)


class NoOther(Frozen):
    """The result has a gradient for no other reason."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        self.ask(h)
        return h, h.exp()


class New(Frozen):
    """A new value itself is a result, beside one that is not to require a gradient."""

    def forward(self, x: Tensor) -> Any:
        h = torch.ones(8, requires_grad=True)
        return h, torch.zeros(8, requires_grad=False) + h * self.a(x)


@pytest.mark.parametrize("kind", [Leaves, NoOther, New])
def test_results_require_the_gradients_that_the_plain_models_do(kind: type[nn.Module]) -> None:
    plain, model = twins(kind(), Policy("bfloat16"))
    leaves = []
    for each in (plain, model):
        leaf, result = each(X)
        assert leaf.requires_grad and leaf.is_leaf and result.requires_grad
        result.square().mean().backward()
        leaves.append(leaf.grad)
    assert distance(leaves[1], leaves[0]) <= BFLOAT16


def test_a_new_value_that_requires_one_is_not_written_to() -> None:
    class Writes(Two):
        def forward(self, x: Tensor) -> Tensor:
            loss = torch.zeros((), requires_grad=True)
            loss += self.b(self.a(x)).mean()
            return loss

    for model in twins(Writes(), Policy("bfloat16")):
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            model(X)
