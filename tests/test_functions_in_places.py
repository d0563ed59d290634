"""Places in a model at which a custom autograd function may be that runs under autocast.

The reference is the plain model.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from counting import MatmulCounter
from product_functions import CastProduct, Net, Product, X, trained
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import amp_graph
from amp_graph import Policy

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class BesideRegion(Net):
    """Autocast is off there on another device, as in models that were written for it."""

    @torch._dynamo.disable
    def uncaptured(self, x: Tensor) -> Tensor:
        x = self.between(x)
        with torch.autocast("cuda", enabled=False):
            return self.product(x)


class Doubles(Function):
    """Writes into what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 2, None


class Writes(Net):
    """The result of the function is not used, but what it wrote is."""

    @torch._dynamo.disable
    def uncaptured(self, x: Tensor) -> Tensor:
        x = self.between(x)
        self.product(x)
        return x


class CallsCaptured(Function):
    """What it calls is the first graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, net: Within) -> Tensor:
        ctx.net = net
        ctx.save_for_backward(x)
        return net.before(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            ctx.net.before(x).backward(gradient)
        return x.grad, None


class Within(Net):
    """Behind the function nothing is captured."""

    @torch._dynamo.disable(recursive=False)
    def forward(self, x: Tensor) -> Tensor:
        x = CallsCaptured.apply(x.requires_grad_(), self)  # type: ignore[no-untyped-call]
        return self.uncaptured(x)


class Checkpointed(Net):
    """The function runs again in the backward pass, behind a product that runs under autocast."""

    reentrant = False

    @torch._dynamo.disable
    def uncaptured(self, x: Tensor) -> Tensor:
        inner = super().uncaptured
        return checkpoint(inner, x, use_reentrant=self.reentrant).relu()


class CheckpointedInside(Checkpointed):
    reentrant = True


class CheckpointedInRegion(BesideRegion):
    """The checkpoint is in the model's own region."""

    @torch._dynamo.disable
    def uncaptured(self, x: Tensor) -> Tensor:
        x = self.between(x)
        with torch.autocast("cuda", enabled=False):
            return checkpoint(self.product, x, use_reentrant=False).relu()


class CheckpointedGraphs(Checkpointed):
    """What is in front of the function is captured by itself."""

    @torch._dynamo.disable(recursive=False)
    def uncaptured(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return self.product(self.between(x))

        return checkpoint(torch._dynamo.disable(inner, recursive=False), x, use_reentrant=False)


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        *((BesideRegion, Product), (Writes, Doubles), (Within, CastProduct)),
        *((Checkpointed, Product), (CheckpointedInside, Product), (Checkpointed, CastProduct)),
        *((CheckpointedInRegion, Product), (CheckpointedGraphs, Product)),
    ],
)
def test_it_trains_wherever_the_function_is(kind: type[Net], function: type[Function]) -> None:
    torch.manual_seed(0)
    plain = kind(function)
    model = amp_graph.convert(copy.deepcopy(plain), policy=Policy("bfloat16"))
    torch.testing.assert_close(trained(model), trained(plain), rtol=0.02, atol=0)
    with MatmulCounter() as counter:
        model(X)
    assert counter.low_share >= 2 / 3
