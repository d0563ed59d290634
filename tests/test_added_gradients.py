"""Gradients that add up in what moves float32 values: as many as a cast has readers at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import SIZE, W, X, run

from amp_graph import Policy

STEPS = 40


def many(function: Callable[..., Any], *args: torch.Tensor, **how: Policy) -> list[str]:
    """What is told of the nodes that are float32 for their gradients."""
    x, *others = args
    plan = run(function, x.clone().requires_grad_(), *others, **how).plan
    return [p.because for p in plan.paints.values() if p.rule == "read by many"]


def shifted_at_each_step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h, total = x.softmax(-1), torch.zeros(())
    for _ in range(STEPS):
        h = h.roll(1, 0)
        total = total + (h @ w).sum()
    return total


def test_of_what_is_shifted_at_each_step_all_later_readers_count() -> None:
    assert many(shifted_at_each_step, X, W) == [str(n) for n in range(STEPS, 16, -1)]


def test_gradients_of_what_is_shifted_at_each_step_do_not_stop_growing() -> None:
    result = run(shifted_at_each_step, X.clone().requires_grad_(), W)
    exact, rounded = X.clone().requires_grad_(), X.clone().requires_grad_()
    shifted_at_each_step(exact, W).backward()
    result(rounded, W).backward()
    assert (rounded.grad - exact.grad).norm() < 0.03 * exact.grad.norm()


def windows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1).unfold(1, SIZE // 2, 1).unfold(1, 5, 1) @ torch.ones(5, 4)


def test_windows_of_windows_count_as_often_as_they_overlap() -> None:
    assert many(windows, X, W) == ["20"]


def test_where_nobody_takes_gradients_fewer_bytes_are_cast() -> None:
    with torch.no_grad():
        assert not many(windows, X, W)
    assert not many(lambda w, x: windows(x, w) * w.sum(), W, X)  # x needs none


def repeated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1).expand(600, SIZE, SIZE) @ w


@pytest.mark.parametrize(("dtype", "expected"), [("float16", ["600"]), ("bfloat16", [])])
def test_of_what_is_repeated_a_sum_of_gradients_may_overflow_in_float16(
    dtype: str, expected: list[str]
) -> None:
    assert many(repeated, X, W, policy=Policy(dtype)) == expected


def test_what_is_not_moved_counts_its_own_readers() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x.softmax(-1)
        return sum((h @ (w * n)).sum() for n in range(STEPS))  # type: ignore[return-value]

    assert not many(function, X, W)


@pytest.mark.parametrize(("readers", "expected"), [(15, []), (16, ["17"])])
def test_where_it_is_returned_a_gradient_comes_from_outside_too(
    readers: int, expected: list[str]
) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x.softmax(-1).roll(1, 0)
        return h, *((h @ (w * n)).sum() for n in range(readers))

    assert many(function, X, W) == expected
    assert not many(lambda *args: function(*args)[1:], X, W)
