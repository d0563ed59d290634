"""Custom functions that go through rows and columns in chunks, and that are made for autocast."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from product_functions import Net, X, trained
from torch import Tensor, nn
from torch.autograd import Function
from training import assert_same_gradients

import amp_graph
from amp_graph import Policy

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
ROWS, COLUMNS = 6, 8


class Chunked(Function):
    """The logarithm of the sum of exponentials of each row of `x @ w.t()`, by tiles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        total = x.new_zeros(len(x))
        for row in range(0, len(x), ROWS):
            end = min(row + ROWS, len(x))
            for column in range(0, len(w), COLUMNS):
                tile = x[row:end] @ w[column : column + COLUMNS].t()
                total[row:end] += tile.float().exp().sum(-1)
        ctx.save_for_backward(x, w, total)
        return total.log()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w, total = ctx.saved_tensors
        weights = (x @ w.t()).exp() / total[:, None] * gradient[:, None]
        return weights @ w, weights.t() @ x


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 19, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = Chunked.apply(self.body(x), self.head.weight).mean()
        return loss


def test_tiles_are_in_one_graph_and_their_products_low() -> None:
    plain = Loss()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for each in (plain, model):
        each(X).backward()
    assert_same_gradients(model, plain, 0.05)
    (plan,) = amp_graph.plans(model)
    forward = next(body for name, body in plan.bodies.items() if name.startswith("fwd"))
    assert {"matmul", "matmul_1", "matmul_2"} <= {*forward.low}


def test_other_numbers_of_rows_are_captured_once_for_as_many_chunks() -> None:
    plain = Loss()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for size in (8, 9, 10, 11, 12):
        x = torch.randn(size, 8)
        torch.testing.assert_close(model(x), plain(x), rtol=0.02, atol=0.02)
    assert len(amp_graph.plans(model)) == 2  # of the first size, and of any


class Asks(Function):
    """Made for autocast, which it asks. Its second result has no gradient."""

    kept: ClassVar[list[torch.dtype]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        is_low = torch.is_autocast_enabled("cpu")
        ctx.dtype = torch.get_autocast_dtype("cpu") if is_low else x.dtype
        ctx.save_for_backward(x, w)
        y = x.to(ctx.dtype).mm(w.to(ctx.dtype).t()).float()
        return y, y.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        Asks.kept.append(ctx.dtype)
        low = gradient.to(ctx.dtype)
        by_weight = low.t().mm(x.to(ctx.dtype)).to(w.dtype)
        return low.mm(w.to(ctx.dtype)).to(x.dtype), by_weight


class AskingNet(Net):
    def uncaptured(self, x: Tensor) -> Tensor:
        result: Tensor = Asks.apply(self.between(x), self.product.w)[0]
        return result


def test_a_function_that_asks_whether_autocast_is_on_runs_under_it() -> None:
    torch.manual_seed(0)
    net = AskingNet(Asks)
    model = amp_graph.convert(copy.deepcopy(net), policy=Policy("bfloat16"))
    expected = trained(net)
    Asks.kept.clear()
    torch.testing.assert_close(trained(model), expected, rtol=0.02, atol=0)
    assert Asks.kept[1:] == [torch.bfloat16] * 2  # from the second call on
    assert any(plan.autocast for plan in amp_graph.plans(model))
