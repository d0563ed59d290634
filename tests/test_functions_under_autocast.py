"""Custom autograd functions between graphs, where code runs under autocast from the second call on.

The reference is the plain model.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from counting import DispatchCounter, MatmulCounter
from product_functions import (
    CastProduct,
    CastProductOfGpus,
    Net,
    Product,
    ProductWith,
    X,
    trained,
)
from torch import Tensor, nn
from torch.autograd import Function
from training import assert_same_gradients
from two_layers import BFLOAT16

import amp_graph
from amp_graph import Policy
from amp_graph.convert import record_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Products(DispatchCounter):
    """The dtypes of the products of two matrices alone, which custom functions make."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def record(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name in ("mm", "addmm"):
            self.dtypes.append(result.dtype)


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


class Reversible(Function):
    """y = x + f(z), v = z + g(y). It keeps these, from which backward finds x and z."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, net: Coupled) -> tuple[Tensor, Tensor]:
        ctx.net = net
        y = x + net.f(z)
        v = z + net.g(y)
        ctx.save_for_backward(y, v)
        return y, v

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, None]:
        y, v = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            g = ctx.net.g(y)
        g.backward(dv)
        z = (v - g).detach().requires_grad_()
        with torch.enable_grad():
            f = ctx.net.f(z)
        f.backward(dy + y.grad)
        return dy + y.grad, dv + z.grad, None


class Coupled(Net):
    """What the function calls is captured, the product in front of it is not."""

    def __init__(self) -> None:
        super().__init__(Product)
        self.f = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.g = copy.deepcopy(self.f)

    @torch._dynamo.disable
    def uncaptured(self, x: Tensor) -> Tensor:
        return self.between(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.uncaptured(self.before(x))
        torch._dynamo.graph_break()
        for _ in range(1):  # in which a break leaves all of this frame to Python
            torch._dynamo.graph_break()
            y, v = Reversible.apply(x, x.sin(), self)  # type: ignore[no-untyped-call]
        return self.behind(y + v)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("training", [True, False])
def test_what_is_captured_inside_is_rewritten(training: bool, dtype: str) -> None:
    torch.manual_seed(0)
    plain = Coupled().train(training)
    model = amp_graph.convert(copy.deepcopy(plain), policy=dtype)
    shares = []
    for _ in range(4):
        plain.zero_grad()
        model.zero_grad()
        plain(X).square().mean().backward()
        with MatmulCounter() as counter:
            loss = model(X).square().mean()
        loss.backward()
        assert_same_gradients(model, plain, within=BFLOAT16)
        shares.append(counter.low_share)
    assert shares == [5 / 7, 1, 1, 1]  # before it is known what is between graphs, and then
    breaks = record_of(model).breaks
    assert all("test_functions_under_autocast.py" in each for each in breaks)  # and none of ours
