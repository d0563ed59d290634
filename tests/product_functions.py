"""Custom autograd functions of a product, and a model that calls one between its graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

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
