"""Calls inside of a model that Dynamo captures otherwise than Python runs them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X = torch.randn(4, 8)
Read = Callable[[], Any]


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


def test_coroutines_run_as_in_python() -> None:
    plain = Asynchronous()
    expected = plain(X)
    model = amp_graph.convert(plain, policy="bfloat16")
    for _ in range(3):
        torch.testing.assert_close(model(X), expected, rtol=0.05, atol=0.05)
