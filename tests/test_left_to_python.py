"""Calls inside of a model that Dynamo captures otherwise than Python runs them."""

from __future__ import annotations

import asyncio
import copy
import runpy
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from training import assert_same_gradients

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X = torch.randn(4, 8)
Read = Callable[[], Any]


@pytest.mark.parametrize("gone", ["set_default_tensor_type", "DoubleTensor"])
def test_names_that_pytorch_no_longer_has_are_done_without(gone, monkeypatch):
    monkeypatch.delattr(torch, gone)
    folder = Path(amp_graph.__file__).parent / "dynamo_changes"
    setters = runpy.run_path(str(folder / "left_to_python.py"))["SETTERS"]
    legacy = runpy.run_path(str(folder / "listed_numbers.py"))["LEGACY"]
    assert torch.set_default_dtype in setters and torch.LongTensor in legacy


@contextmanager
def put_back(read: Read, write: Callable[[Any], None]) -> Iterator[None]:
    before = read()
    try:
        yield
    finally:
        write(before)


def allow_tf32(value: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = value


SETTINGS: dict[str, tuple[Read, Callable[[Any], None], Any]] = {
    "dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "deterministic": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
        True,
    ),
    "debug": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 1),
    "products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "tf32": (lambda: torch.backends.cuda.matmul.allow_tf32, allow_tf32, True),
    "warnings": (torch.is_warn_always_enabled, torch.set_warn_always, True),
    "attention": (
        torch.backends.cuda.flash_sdp_enabled,
        torch.backends.cuda.enable_flash_sdp,
        False,
    ),
    # By what `torch.backends.mkldnn.enabled = False` does unless tests of PyTorch's own forbid it.
    "mkldnn": (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False),
}


@pytest.mark.parametrize(("read", "write", "value"), SETTINGS.values(), ids=SETTINGS.keys())
def test_a_setting_is_made_in_each_call(
    read: Read, write: Callable[[Any], None], value: Any
) -> None:
    class Setting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.layer(x)
            write(value)
            return self.layer(x), torch.linspace(0.0, 1.0, 3)

    model = amp_graph.convert(Setting(), policy="bfloat16")
    for _ in range(3):
        with put_back(read, write):
            assert read() != value
            _, made = model(X)
            assert read() == value
            assert made.dtype is torch.get_default_dtype()
    assert all(plan.low for plan in amp_graph.plans(model))


def test_a_setting_that_is_taken_back_rules_in_between() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, times: float) -> tuple[Tensor, Tensor]:
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
            phase = torch.sin(torch.linspace(0.0, 1000.0, 8) * times * 1e4)
            torch.set_default_dtype(before)
            return self.layer(x), phase

    plain = Wide()
    expected = [plain(X, times)[1] for times in (1.0, 2.0, 3.0)]
    amp_graph.convert(plain, policy="bfloat16")
    for times, phase in zip((1.0, 2.0, 3.0), expected, strict=True):
        assert torch.equal(plain(X, times)[1], phase)


class Asynchronous(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    async def encode(self, x: Tensor) -> Tensor:
        await asyncio.sleep(0)
        return self.layer(x)

    async def parts(self, x: Tensor) -> AsyncIterator[Tensor]:
        for row in x:
            yield await self.encode(row)

    async def both(self, x: Tensor) -> Tensor:
        async def once_more() -> Tensor:
            return await self.encode(x)

        whole, again = await asyncio.gather(self.encode(x), once_more())
        return whole + again + torch.stack([row async for row in self.parts(x)])

    def forward(self, x: Tensor) -> Tensor:
        async def begin() -> Tensor:
            return await self.both(self.layer(x))

        return self.layer(asyncio.run(begin()))


class Begins(Asynchronous):
    """Makes a coroutine before it runs."""

    async def encode(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        begun = self.encode(x)
        return self.layer(x) + asyncio.run(begun)


@pytest.mark.parametrize("kind", [Asynchronous, Begins])
def test_coroutines_run_as_in_python(kind: type[nn.Module]) -> None:
    plain = kind()
    expected = plain(X)
    model = amp_graph.convert(plain, policy="bfloat16")
    for _ in range(3):
        torch.testing.assert_close(model(X), expected, rtol=0.05, atol=0.05)


class LengthAndDouble(Function):
    """Tells a result without a gradient from one whose gradient is zero: a length of zero has none
    of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x * 2, x.norm(dim=-1)

    @staticmethod
    def backward(ctx: Any, doubled: Tensor | None, length: Tensor | None) -> Tensor | None:
        (x,) = ctx.saved_tensors
        found = None if doubled is None else 2 * doubled
        if length is not None:
            of_length = length[..., None] * x / x.norm(dim=-1, keepdim=True)
            found = of_length if found is None else found + of_length
        return found


class Doubles(Function):
    """It tells, too, but has one result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else 2 * gradient


class Applies(nn.Module):
    def __init__(self, function: type[Function]) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        found = self.function.apply(self.first(x) * mask)
        return self.second(found[0] if isinstance(found, tuple) else found)


@pytest.mark.parametrize(("function", "is_whole"), [(LengthAndDouble, False), (Doubles, True)])
def test_a_result_without_a_gradient_is_none_in_a_custom_function(function, is_whole) -> None:
    plain = Applies(function)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    mask = torch.tensor([1.0, 1.0, 0.0, 0.0])[:, None]
    for each in (plain, model):
        each(X, mask).sum().backward()
    assert_same_gradients(model, plain, 0.05)
    assert all(plan.fallback is None for plan in amp_graph.plans(model)) or not is_whole
    assert (len(amp_graph.plans(model)) == 1) is is_whole
