"""What a model makes lies on the default device in its graphs, too."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import amp_graph
from amp_graph.convert import record_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

MADE: dict[str, Callable[[int], Tensor]] = {
    "arange": lambda n: torch.arange(n),
    "arange, none given": lambda n: torch.arange(n, device=None),
    "linspace": lambda n: torch.linspace(0, 1, n),
    "zeros": lambda n: torch.zeros(n),
    "full": lambda n: torch.full((n,), 2.0),
    "eye": lambda n: torch.eye(n)[0],
}


class Placed(nn.Module):
    def __init__(self, make: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(8, 8), make

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = self.make(x.shape[0])
        there = torch.arange(3, device="cpu")
        return self.layer(x) + made.unsqueeze(-1), made, there


@contextlib.contextmanager
def by_setting() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("default", [by_setting, lambda: torch.device("meta")])
@pytest.mark.parametrize("make", MADE.values(), ids=MADE.keys())
def test_new_tensors_lie_there(make: Callable[[int], Tensor], default: Callable) -> None:
    with default():
        model = amp_graph.convert(Placed(make), policy="bfloat16")
        for n in (4, 5, 6):
            x, made, there = model(torch.randn(n, 8))
            assert (x.device.type, made.device.type, there.device.type) == ("meta", "meta", "cpu")
    plans = amp_graph.plans(model)
    assert 1 <= len(plans) <= 2 and all(p.has_low and p.fallback is None for p in plans)


def test_without_one_they_lie_on_the_cpu() -> None:
    model = amp_graph.convert(Placed(torch.arange), policy="bfloat16")
    for _ in range(2):
        assert model(torch.randn(4, 8))[1].device.type == "cpu"
        with torch.device("meta"):
            assert torch.arange(2).device.type == "meta"


class Scheduled(nn.Module):
    """Computes a number of one that is another in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.step = nn.Linear(8, 8), 0.0

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        self.step += 1
        return self.layer(x), math.exp(-self.step)


def test_a_number_that_leaves_a_graph_is_that_number() -> None:
    with torch.device("cpu"):
        model = amp_graph.convert(Scheduled(), policy="bfloat16")
        for step in range(1, 6):
            assert model(torch.randn(4, 8))[1] == pytest.approx(math.exp(-step), rel=1e-14)
    assert len(amp_graph.plans(model)) <= 3


CALLED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "unflatten": lambda layer, x: layer(x).unflatten(-1, (2, -1)),
    "unflatten, by name": lambda layer, x: layer(x).unflatten(dim=-1, sizes=(2, 4)),
    "nn.Unflatten": lambda layer, x: nn.Unflatten(-1, (2, 4))(layer(x)),
    "a layer to a device": lambda layer, x: layer.float().to(x.device)(x),
    "NumPy compares": lambda layer, x: layer(x) if np.log(x.shape[0]) > 0.5 else x,
}


class Calls(nn.Module):
    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.call = nn.Linear(8, 8), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)


@pytest.mark.parametrize("call", CALLED.values(), ids=CALLED.keys())
def test_what_is_captured_without_one_is_captured_under_it(call: Callable) -> None:
    with torch.device("cpu"):
        plain, x = Calls(call), torch.randn(4, 8)
        model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
        with torch.autocast("cpu", torch.bfloat16):
            expected = plain(x)
        torch.testing.assert_close(model(x), expected.float())
    (plan,) = amp_graph.plans(model)
    assert plan.has_low and not record_of(model).breaks
