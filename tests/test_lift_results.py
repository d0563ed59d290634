"""What a graph returns is widened at its boundary, where its gradient is scaled and narrowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from counting import DispatchCounter, tensors
from graphs import W, X, capture, rewritten
from torch import nn

import amp_graph
from amp_graph.passes.lift_results import lift_results

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def widened(function: Callable[..., Any], *args: Any) -> frozenset[int]:
    """Which results are lifted; what is left and widened is what the graph returned."""
    emitted = rewritten(capture(function, *args)).module
    lifted, positions = lift_results(emitted)
    for i, (low, wide) in enumerate(zip(lifted(*args), emitted(*args), strict=True)):
        assert low.dtype is (torch.bfloat16 if i in positions else wide.dtype)
        torch.testing.assert_close(low.to(wide.dtype), wide, rtol=0, atol=0)
    return positions


def test_casts_of_results_are_lifted() -> None:
    assert widened(lambda x, w: (x @ w,), X, W) == {0}
    assert widened(lambda x, w: ((x @ w).exp(), w @ x), X, W) == {1}


def test_a_result_that_is_returned_twice_is_lifted_twice() -> None:
    def twice(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ w
        return y, y

    assert widened(twice, X, W) == {0, 1}


def test_a_cast_that_something_else_reads_stays() -> None:
    def both(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ w
        return y, y.exp()

    assert widened(both, X, W) == set()


def test_a_cast_before_a_write_stays() -> None:
    emitted = rewritten(capture(lambda x, w: (x @ w,), X, W)).module
    (cast,) = [n for n in emitted.graph.nodes if n.name == "allow1_float32"]
    with emitted.graph.inserting_after(cast):
        emitted.graph.call_function(torch.ops.aten.relu_.default, (cast.args[0],))
    assert lift_results(emitted) == (emitted, set())


def test_a_cast_stays_where_recording_changes() -> None:
    def unrecorded(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            y = x @ w
        return (y,)

    assert widened(unrecorded, X, W) == set()


class Products(DispatchCounter):
    """The dtypes in which elements of a matrix were multiplied by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.dtype] = []

    def record(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name == "mul" and next(iter(tensors(args))).ndim == 2:
            self.found.append(result.dtype)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_the_scaled_gradient_is_not_kept_in_float32(compiler: str) -> None:
    policy = amp_graph.Policy("float16", loss_scale=2.0**10, compiler=compiler)
    model = amp_graph.convert(nn.Linear(4, 4), policy=policy)
    loss = model(torch.rand(3, 4)).sum()
    with Products() as products:
        loss.backward()
    # Compiled, it is multiplied inside, in the kernel that casts it.
    assert products.found == ([torch.float16] if compiler == "eager" else [])
    torch.testing.assert_close(model.bias.grad, torch.full((4,), 3.0))


def test_one_result_for_two_places_stays_one() -> None:
    class Twice(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = super().forward(x)
            return y, y

    for scale in (None, 2.0**10):
        model = amp_graph.convert(
            Twice(4, 4), policy=amp_graph.Policy("bfloat16", loss_scale=scale)
        )
        one, other = model(torch.rand(3, 4))
        assert one is other
        assert one.dtype is torch.float32
        (one.sum() + other.sum()).backward()
        torch.testing.assert_close(model.bias.grad, torch.full((4,), 6.0))
