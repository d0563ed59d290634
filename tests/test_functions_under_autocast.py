"""Custom autograd functions between graphs, where code runs under autocast from the second call on.

The reference is the plain model.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from counting import DispatchCounter
from torch import Tensor, nn
from torch.autograd import Function

import amp_graph
from amp_graph import Policy

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


class Product(Function):
    """Its backward pass is for gradients and operands of one type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x.mm(w.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient.mm(w), gradient.t().mm(x)


class CastProduct(Product):
    forward = torch.amp.custom_fwd(Product.forward, device_type="cpu")
    backward = torch.amp.custom_bwd(Product.backward, device_type="cpu")


class CastProductOfGpus(Product):
    forward = torch.amp.custom_fwd(Product.forward, device_type="cuda")
    backward = torch.amp.custom_bwd(Product.backward, device_type="cuda")


class ProductWith(Function):
    """With a weight that is no argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: ProductLayer) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return x.mm(layer.w.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        ctx.layer.w.backward(gradient.t().mm(x))
        return gradient.mm(ctx.layer.w), None


class ProductLayer(nn.Module):
    def __init__(self, function: type[Function]):
        super().__init__()
        self.function, self.w = function, nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        given = self if self.function is ProductWith else self.w
        result: Tensor = self.function.apply(x, given)  # type: ignore[no-untyped-call]
        return result


class Net(nn.Module):
    def __init__(self, function: type[Function]):
        super().__init__()
        self.before, self.between, self.behind = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.product = ProductLayer(function)

    @torch._dynamo.disable
    def uncaptured(self, x: Tensor) -> Tensor:
        return self.product(self.between(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.uncaptured(self.before(x).relu()))


class Products(DispatchCounter):
    """The dtypes of the products of two matrices alone, which custom functions make."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def record(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name in ("mm", "addmm"):
            self.dtypes.append(result.dtype)


def trained(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("function", [Product, ProductWith, CastProduct, CastProductOfGpus])
def test_it_trains_as_in_the_plain_model(function: type[Function]) -> None:
    torch.manual_seed(0)
    net = Net(function)
    model = amp_graph.convert(copy.deepcopy(net), policy=Policy("bfloat16"))
    torch.testing.assert_close(trained(model), trained(net), rtol=0.02, atol=0)
    assert any(plan.autocast for plan in amp_graph.plans(model))


@pytest.mark.parametrize(
    ("function", "precision"),
    [
        *((Product, torch.float32), (ProductWith, torch.float32)),
        *((CastProductOfGpus, torch.float32), (CastProduct, torch.bfloat16)),
    ],
)
def test_only_what_is_made_for_autocast_runs_under_it(
    function: type[Function], precision: torch.dtype
) -> None:
    model = amp_graph.convert(Net(function), policy=Policy("bfloat16"))
    trained(model)
    with torch.no_grad(), Products() as products:
        model(X)
    low = torch.bfloat16
    assert products.dtypes == [low, low, precision, low]  # before, between, the function, behind


def test_elsewhere_functions_are_as_they_are() -> None:
    trained(amp_graph.convert(Net(Product), policy=Policy("bfloat16")))
    w = torch.eye(8)
    with torch.autocast("cpu", torch.bfloat16):
        result = Product.apply(X, w)  # type: ignore[no-untyped-call]
    assert result.dtype is torch.bfloat16
