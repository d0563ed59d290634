"""Memory that ran out in a first call costs nothing: it may well run at the next, smaller batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import amp_graph
from amp_graph.backend.guarded import Guarded
from amp_graph.convert import record_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_the_graph_stays() -> None:
    def emitted(x: Tensor) -> Tensor:
        if len(x) > 2:
            raise torch.OutOfMemoryError("planted")
        return x + 1

    run = Guarded(emitted, lambda x: x, [0], lambda reason: pytest.fail(reason))
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        run(torch.zeros(4))
    assert torch.equal(run(torch.zeros(2)), torch.ones(2))


calls: list[int] = []


@torch.library.custom_op("amp_graph_test::fill_memory", mutates_args=())
def fill_memory(x: Tensor) -> Tensor:
    calls.append(len(x))
    if len(x) > 2:
        raise torch.OutOfMemoryError("planted")
    return x * 2


fill_memory.register_fake(torch.empty_like)
fill_memory.register_autograd(lambda ctx, gradient: gradient * 2)


class Large(nn.Module):
    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.layer, self.asks = nn.Linear(8, 8), asks

    def forward(self, x: Tensor) -> Tensor:
        if self.asks and torch.compiler.is_compiling():
            x = x * 1
        return self.layer(fill_memory(self.layer(x)))


@pytest.mark.filterwarnings("error::amp_graph.ConversionWarning")
@pytest.mark.parametrize("asks", [False, True])
def test_the_call_is_not_tried_in_another_way(asks: bool) -> None:
    """`asks`: whether it is compiled, after which errors may be ours."""
    model = amp_graph.convert(Large(asks), policy="bfloat16")
    calls.clear()
    for size in (8, 4, 2):
        if size > 2:
            with pytest.raises(torch.OutOfMemoryError, match="planted"):
                model(torch.randn(size, 8))
        else:
            model(torch.randn(size, 8)).sum().backward()
    assert calls == [8, 4, 2]
    assert all(p.has_low and p.fallback is None for p in amp_graph.plans(model))
    assert not record_of(model).breaks
