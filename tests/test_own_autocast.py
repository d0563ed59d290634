"""Models that run a part of themselves under autocast: it ends with the part, whatever happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import assert_same_gradients, distance, twins
from two_layers import BFLOAT16, POLICIES, Product

import amp_graph
from amp_graph.outer_autocast import autocast_devices

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Casts(nn.Module):
    """Under autocast of its own in part, in which an operator runs that nothing else has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            h = self.layer(x).index_select(0, index)
        return self.layer(h.float())


def test_a_fallback_in_the_first_run_is_under_the_modes_of_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The emitted graph fails inside of autocast, which its end would have left."""
    model = amp_graph.convert(Casts(), policy="bfloat16")

    def failing(*args: Any) -> Tensor:
        assert torch.is_autocast_enabled("cpu")
        raise RuntimeError("planted")

    planted = {torch.ops.aten.index_select.default: failing}
    monkeypatch.setattr("amp_graph.backend.eager.binding", planted.get)
    with pytest.warns(amp_graph.ConversionWarning, match="planted"):
        assert model(X, torch.tensor([0, 1])).dtype is torch.float32
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16


def test_an_error_inside_of_autocast_leaves_it() -> None:
    model = amp_graph.convert(Casts(), policy="bfloat16")
    model(X, torch.tensor([0, 1]))
    with pytest.raises(IndexError):
        model(X, torch.tensor([0, 99]))
    assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu"):
        assert nn.Linear(8, 8)(X).dtype is torch.bfloat16
    assert nn.Linear(8, 8)(X).dtype is torch.float32


class Speaks(nn.Module):
    """Two graphs, which are captured by themselves wherever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        print(end="")
        return self.b(x)


class Calls(nn.Module):
    """In a region, and out of it."""

    def __init__(self, enabled: bool, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.speaks, self.last = Speaks(), nn.Linear(8, 8)
        self.region = {"dtype": dtype, "enabled": enabled}

    def forward(self, x: Tensor, outside: bool = False) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", **self.region):
            y = self.speaks(x)
        return y, self.speaks(x) if outside else self.last(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_what_is_captured_by_itself_in_a_region_belongs_to_it(
    policy: amp_graph.Policy, enabled: bool, dtype: torch.dtype
) -> None:
    plain, model = twins(Calls(enabled, dtype), policy)
    for outside in (False, True, False):
        results = [each(X, outside) for each in (plain, model)]
        for y, z in results:
            (y.float().square().mean() + z.square().mean()).backward()
        (y, z), (own_y, own_z) = results
        assert own_y.dtype is y.dtype and torch.equal(own_y, y)
        assert own_z.dtype is z.dtype and 0 < distance(own_z, z) <= BFLOAT16
        assert_same_gradients(model, plain, BFLOAT16)
    *first, a, b = amp_graph.plans(model)
    assert a.low and b.low and not any(plan.fallback for plan in (*first, a, b))


@pytest.mark.parametrize("accelerator", ["cuda", "privateuseone"])
def test_a_region_is_written_once_for_each_kind_of_device(
    monkeypatch: pytest.MonkeyPatch, accelerator: str
) -> None:
    found = torch.device(accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    kinds = autocast_devices()
    assert accelerator in kinds and len(kinds) == len({*kinds})


def test_autocast_around_the_call_is_no_region() -> None:
    plain, model = twins(Speaks(), amp_graph.Policy("bfloat16"))
    before = model(X)
    for enabled in (True, False):
        with torch.autocast("cpu", torch.float16, enabled=enabled):
            assert torch.equal(model(X), before)
    assert len(amp_graph.plans(model)) == 2 and not torch.equal(before, plain(X))


INSIDE: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "checkpoint": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "function": lambda layer, x: Product.apply(x, layer.weight),
    "cond": lambda layer, x: torch.cond(x.sum() > 0, layer, lambda x: layer(x) * 2, (x,)),
}


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_graphs_inside_of_a_graph_belong_to_its_region(
    policy: amp_graph.Policy, inside: Callable[[nn.Linear, Tensor], Tensor], breaks: bool
) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            if breaks:
                print(end="")
            return inside(self.layer, x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = Inner(), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.autocast("cpu", enabled=False):
                y = self.inner(x * 1e6)  # beyond float16
            return y, self.last(x)

    plain, model = twins(Outer(), policy)
    results = [each(X) for each in (plain, model)]
    for y, z in results:
        (y.sum() + z.sum()).backward()
    (y, z), (own_y, own_z) = results
    assert torch.equal(own_y, y) and 0 < distance(own_z, z) <= BFLOAT16
    assert_same_gradients(model, plain, BFLOAT16)
