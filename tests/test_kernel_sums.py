"""Kernels that add up in the precision of their tensors: how much, and what comes of it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from graphs import W, X, capture_module, rewritten, run
from torch import Tensor, nn
from torch.nn import functional as F

import amp_graph
from amp_graph import Policy
from amp_graph.capture.retrace import trace
from amp_graph.graphs.kernel_sums import added_up

Function = Callable[[Tensor], Tensor]


def first(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.long)


# By what their gradients are sums of, and a shape.
SUMS: dict[str, tuple[Function, tuple[int, ...]]] = {
    "average": (lambda x: F.avg_pool2d(x, 15, 1, 7) * 225, (1, 2, 40, 40)),
    "average of rows": (lambda x: F.avg_pool2d(x, (1, 70), 1) * 70, (1, 2, 4, 200)),
    "average with a stride": (lambda x: F.avg_pool1d(x, 300, 2) * 300, (2, 2, 1200)),
    "average of a volume": (lambda x: F.avg_pool3d(x, 5, 1, 2) * 125, (1, 2, 12, 12, 12)),
    "average of a small window": (lambda x: F.avg_pool2d(x, 3, 1, 1) * 9, (1, 2, 12, 12)),
    "average of tiles": (lambda x: F.avg_pool2d(x, 16) * 256, (1, 2, 32, 32)),
    "border": (lambda x: F.pad(x, (2, 90), mode="replicate"), (1, 2, 8)),
    "corners": (lambda x: F.pad(x, (9, 2, 3, 9), mode="replicate"), (1, 2, 8, 8)),
    "small border": (lambda x: F.pad(x, (1, 1, 2, 2), mode="replicate"), (1, 2, 8, 8)),
    "windows": (lambda x: x.unfold(-1, 100, 1), (2, 1200)),
    "few windows": (lambda x: x.unfold(-1, 100, 10), (2, 1200)),
    "patches": (lambda x: F.unfold(x, 9, padding=4), (1, 2, 24, 24)),
    "stacked": (lambda x: torch.stack([x] * 80), (4, 8)),
    "joined": (lambda x: torch.cat([x, torch.ones_like(x), *[x] * 71]), (4, 8)),
    "zeros": (lambda x: F.pad(x, (90, 90)), (1, 2, 8)),
}
# By what their results are sums of.
FORWARD: dict[str, tuple[Function, tuple[int, ...]]] = {
    "whole": (lambda x: F.adaptive_avg_pool3d(x, (None, 1, 1)) * 1024, (1, 2, 4, 32, 32)),
    "parts": (lambda x: F.adaptive_avg_pool3d(x, 2) * 512, (1, 2, 16, 16, 16)),
    "index_put": (
        lambda x: x.new_zeros(3, 8).index_put((first(4096),), x, accumulate=True),
        (4096, 8),
    ),
    "put": (lambda x: x.new_zeros(8).put(first(99), x, accumulate=True), (99,)),
    "addbmm": (lambda x: torch.addbmm(x[0], x, torch.eye(8).expand(500, 8, 8)), (500, 8, 8)),
}


@pytest.mark.parametrize("name", SUMS)
def test_as_many_gradients_as_ones_add_up_to(name: str) -> None:
    function, shape = SUMS[name]
    x = torch.ones(shape, requires_grad=True)
    function(x).sum().backward()
    assert x.grad is not None
    counted = max(added_up(node) for node in trace(function, (x.detach(),)).graph.nodes)
    assert counted == round(float(x.grad.max()))


@pytest.mark.parametrize("name", FORWARD)
def test_as_many_numbers_as_ones_add_up_to(name: str) -> None:
    function, shape = FORWARD[name]
    x = torch.ones(shape)
    counted = max(added_up(node) for node in trace(function, (x,)).graph.nodes)
    assert counted == pytest.approx(float(function(x).max()), abs=1)


class Net(nn.Module):
    def __init__(self, function: Function, width: int) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(width, width), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x) + 1)


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    return [y.detach(), x.grad]


@pytest.mark.parametrize("name", [*SUMS, *FORWARD])
def test_sums_are_as_good_as_one_rounding_makes_them(name: str) -> None:
    function, shape = {**SUMS, **FORWARD}[name]
    plain = Net(function, shape[-1])
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    for given, expected in zip(results(model, x), results(plain, x), strict=True):
        assert (given - expected).norm() < 0.012 * expected.norm()


def test_few_are_added_up_in_low_precision_and_more_in_float16() -> None:
    def low(window: int, dtype: str) -> bool:
        net = Net(lambda x: F.avg_pool1d(x, window, 1), 256)
        plan = rewritten(capture_module(net, torch.ones(1, 2, 256)), Policy(dtype)).plan
        return any("avg_pool1d" in plan.facts[name].op for name in plan.low)

    assert low(64, "bfloat16") and not low(65, "bfloat16")
    assert low(65, "float16")


@pytest.mark.parametrize("lookup", [lambda x: x[first(4096)], lambda x: x.take(first(4096))])
def test_lookups_are_no_sums_of_their_own(lookup: Function) -> None:
    """The average over all entries counts for them, see `crowded`."""
    model = amp_graph.convert(Net(lookup, 8), policy="bfloat16")
    plain = Net(lookup, 8)
    plain.load_state_dict(model.state_dict())
    x = torch.rand(2, 8)
    for given, expected in zip(results(model, x), results(plain, x), strict=True):
        assert (given - expected).norm() < 0.012 * expected.norm()


LOOKUPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda table, i: table[i],
    "_unsafe_index": lambda table, i: torch.ops.aten._unsafe_index(table, [i]),
    "take": lambda table, i: table.take(i * 8).unsqueeze(1).expand(-1, 8),
    "embedding": lambda table, i: F.embedding(i, table),
}


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 256), ("float16", 2048)])
def test_a_table_is_float32_once_each_entry_is_looked_up_so_often(
    name: str, dtype: str, most: int
) -> None:
    """Behind so many ones a sum that is rounded to 8, or 11, bits stops growing."""
    entries = X.numel() if name == "take" else len(X)

    def rules(count: int) -> list[str]:
        plan = run(
            lambda x, w, i: LOOKUPS[name](x @ w, i) @ w, X, W, first(count), policy=Policy(dtype)
        ).plan
        return [p.because for p in plan.paints.values() if p.rule == "looked up often"]

    assert not rules(most * entries * 3 // 4)
    assert not rules(most * entries - 1)
    assert rules(most * entries) == ["allow1"]
