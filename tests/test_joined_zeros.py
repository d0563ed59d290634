"""Zeros and ones that low values are joined with: they hold no digits, but sums begin with them."""

import pytest
import torch
from graphs import SIZE, W, X, run

from amp_graph import Policy


def test_zeros_that_low_values_are_joined_with_add_no_digits():
    """As the column in front of scores that are shifted, or the other branch of a mask."""

    def function(x, w, mask):
        shifted = torch.cat([x.new_zeros(1, SIZE).t(), x @ w], dim=1)[:, 1:]
        return (torch.where(mask, shifted, torch.zeros_like(x)) + x @ w) @ w

    result = run(function, X, W, X > 0, policy=Policy("bfloat16"))
    assert result.is_low("infer1")
    assert result.casts() == ["x -> bfloat16", "w -> bfloat16", "allow3 -> float32"]
    assert not run(function, X, W, X > 0).is_low("infer1")  # level safe, as under autocast


def test_they_do_where_float32_arithmetic_goes_on():
    """As autocast promotes: of steps that smooth, each would round what the last one gave."""

    def function(x, w):
        h = torch.stack([torch.zeros(SIZE, SIZE), x @ w])
        for _ in range(3):
            h = 0.9 * h + 0.1 * h.flip(0)
        return h

    result = run(function, X, W, policy=Policy("bfloat16"))
    assert not any(result.is_low(n) for n in result.plan.paints if n.startswith("infer"))


def written(zeros, rows):
    zeros[:2] = rows
    return zeros


@pytest.mark.parametrize(
    "wide",
    [
        lambda x, ids: x,
        lambda x, ids: ids.float(),
        lambda x, ids: torch.zeros(SIZE, SIZE).copy_(x),
        lambda x, ids: written(torch.zeros(SIZE, SIZE), x[:2]),
        lambda x, ids: torch.cat([torch.zeros(2, SIZE), x[2:]]),
        lambda x, ids: torch.ones(SIZE, SIZE) * 0.3,
    ],
    ids=["an input", "integers", "a copy", "zeros written to", "a part", "shares"],
)
@pytest.mark.parametrize("level", ["safe", "balanced"])
def test_digits_that_low_values_are_joined_with_stay(wide, level):
    def function(x, w, ids):
        return (torch.where(ids > 0, x @ w, wide(x, ids)) + x @ w) @ w

    policy = Policy("bfloat16", level=level)
    result = run(function, X, W, torch.arange(1001, 1001 + SIZE), policy=policy)
    assert not any(n.startswith("infer") and result.is_low(n) for n in result.plan.paints)


@pytest.mark.parametrize("level", ["safe", "balanced"])
def test_a_sum_that_begins_with_zeros_has_digits(level):
    def function(x, w):
        return (torch.zeros(SIZE, SIZE) + x @ w + x @ w) @ w

    result = run(function, X, W, policy=Policy("bfloat16", level=level))
    assert not result.is_low("infer1") and not result.is_low("infer2")


def low_sums(function):
    result = run(function, X, W)
    return [result.is_low(n) for n in result.plan.paints if n.startswith("infer")]


def test_a_sum_that_begins_with_zeros_like_something_low_is_as_low_as_that():
    """As PyTorch makes them under autocast."""

    def function(x, w):
        first = x @ w
        return (torch.zeros_like(first) + first + x @ w) @ w

    def made_new(x, w):
        first = x @ w
        return (first.new_zeros(SIZE, SIZE) + first + x @ w) @ w

    assert low_sums(function) == low_sums(made_new) == [True, True]
    torch.testing.assert_close(run(function, X, W)(X, W), function(X, W), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    "zeros",
    [
        lambda x, first: torch.zeros_like(x),
        lambda x, first: torch.zeros_like(first, dtype=torch.float32),
        lambda x, first: torch.zeros_like(first.exp()),
        lambda x, first: torch.zeros_like(first).copy_(x),
    ],
    ids=["an input", "float32", "a denied result", "something low, and written to"],
)
def test_so_is_one_that_begins_with_zeros_like_something_wide(zeros):
    def function(x, w):
        first = x @ w
        return (zeros(x, first) + first + x @ w) @ w

    assert low_sums(function) == [False, False]
