"""Conversions in the model's own code: those that name a type ask for it, those that only move a
tensor, or lay it out anew, ask for nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

CL = torch.channels_last
Convert = Callable[[Tensor, Tensor], Tensor]
MOVES: dict[str, Convert] = {
    "to a device": lambda h, x: h.to(x.device),
    "to a device by name": lambda h, x: h.to("cpu", non_blocking=True),
    "to a device by keyword": lambda h, x: h.to(device=x.device),
    "cpu": lambda h, x: h.cpu(),
    "to a tensor": lambda h, x: h.to(x),
    "type_as": lambda h, x: h.type_as(x),
    "a copy": lambda h, x: h.to(x.device, copy=True),
    "a copy by position": lambda h, x: h.to(x.device, None, False, True),
    "a copy on a tensor's device": lambda h, x: h.to(x, False, True),
    "no copy by position": lambda h, x: h.to(x.device, None, True),
    "a memory format": lambda h, x: h.to(memory_format=CL),
    "a memory format that it has": lambda h, x: h.contiguous(memory_format=CL).to(memory_format=CL),
    "a device and a memory format": lambda h, x: h.to(x.device, memory_format=CL),
    "transposed, as it is": lambda h, x: h.mT.to(memory_format=torch.contiguous_format),
}
CASTS: dict[str, Convert] = {
    "float": lambda h, x: h.float(),
    "to a type": lambda h, x: h.to(torch.float32),
    "to a type by keyword": lambda h, x: h.to(dtype=torch.float32),
    "to a device and a type": lambda h, x: h.to(x.device, torch.float32),
}


class Net(nn.Module):
    def __init__(self, convert: Convert):
        super().__init__()
        self.convert = convert
        self.first, self.second = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)
        converted = self.convert(h, x)
        result = self.second(torch.relu(converted))
        converted.mul_(2)  # h is written to as well, unless it was copied
        return result, h


def compared(convert: Convert) -> tuple[amp_graph.ir.Plan, Tensor]:
    """The plan of a model that converts, whose results and gradients were compared."""
    x = torch.randn(2, 2, 5, 5)
    model = Net(convert)
    expected = model(x)
    sum(t.square().mean() for t in expected).backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    results = amp_graph.convert(model, policy="bfloat16")(x)
    sum(t.square().mean() for t in results).backward()
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one, other, atol=0.05, rtol=0.05)
        assert one.stride() == other.stride()
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        assert (p.grad - gradient).norm() <= 0.05 * gradient.norm()
    (plan,) = amp_graph.plans(model)
    assert plan.fallback is None
    return plan


@pytest.mark.parametrize("how", MOVES)
def test_what_names_no_type_asks_for_none(how: str) -> None:
    plan = compared(MOVES[how])
    assert not [n for n, p in plan.paints.items() if p.rule == "user cast"]
    assert "relu" in plan.low


@pytest.mark.parametrize("how", CASTS)
def test_what_names_float32_gets_it(how: str) -> None:
    plan = compared(CASTS[how])
    assert [n for n, p in plan.paints.items() if p.rule == "user cast"]


class Gray(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x * 2).to(memory_format=CL))


def test_one_channel_in_channels_last() -> None:
    """PyTorch calls it contiguous in either format, and yet lays it out by the strides of channels,
    by which a convolution lays out its result, and dropout goes through that."""
    model, x = Gray(1, 4, 3), torch.randn(2, 1, 5, 5)
    strides = model(x).stride()
    assert amp_graph.convert(model, policy="bfloat16")(x).stride() == strides


def test_another_device() -> None:
    model = Net(lambda h, x: h.to("meta"))
    model.second.to("meta")
    with torch.no_grad():
        result, h = amp_graph.convert(model, policy="bfloat16")(torch.randn(2, 2, 5, 5))
    assert (result.device.type, result.dtype) == ("meta", torch.float32)
    assert h.device.type == "cpu"
    (plan,) = amp_graph.plans(model)
    assert plan.fallback is None and "relu" in plan.low


class Exponents(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        bits = hidden.detach().view(torch.int32)
        return self.second(hidden), ((bits >> 23) & 255) - 127


def test_what_looks_at_bits_gets_those_of_float32() -> None:
    model = Exponents()
    x = torch.randn(16, 8)
    plain = model(x)[1]
    amp_graph.convert(model, policy="bfloat16")
    exponents = model(x)[1]
    assert exponents.shape == plain.shape and exponents.dtype is plain.dtype
    assert (exponents - plain).abs().max() <= 1  # a rounding may carry, or pass zero by
    assert amp_graph.plans(model)[0].fallback is None
