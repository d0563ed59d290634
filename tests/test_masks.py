"""Masks, which add no digits to the scores that they leave out."""

from __future__ import annotations

import pytest
import torch
from graphs import SIZE, Rewritten, W, X, run
from torch import Tensor
from torch.nn import functional as F

from amp_graph import Policy

MIN = torch.finfo(torch.float32).min
SEEN = torch.ones(SIZE, SIZE, dtype=torch.bool).tril()
PADDED = SEEN & (torch.arange(SIZE) != 2)  # the first token of the third row sees two others
BLIND = SEEN & (torch.arange(SIZE) != 0)  # the first row sees nothing


def written(seen: Tensor) -> Tensor:
    mask = torch.where(seen, 0.0, MIN)
    mask[:, 0] = 0.3
    return mask


FINITE = {
    "selected": lambda seen: torch.where(seen, torch.zeros(()), MIN),
    "of two numbers": lambda seen: torch.where(seen, 0.0, MIN),
    "of two tensors": lambda seen: torch.where(seen, torch.zeros(()), torch.full((), -1e9)),
    "filled": lambda seen: torch.zeros_like(seen, dtype=torch.float32).masked_fill(~seen, -1e9),
    "of ones": lambda seen: torch.where(seen, 1.0, MIN),
    "of minus ones": lambda seen: torch.where(seen, -1.0, MIN),
    "multiplied": lambda seen: (1.0 - seen.to(torch.float32)) * MIN,
    "selected, then multiplied": lambda seen: torch.where(seen, 0.0, 1.0) * MIN,
    "of whole numbers": lambda seen: (seen.to(torch.float32) + 2.0 - 3.0) * 1e9,
    "moved": lambda seen: torch.where(seen.t(), torch.zeros(()), MIN).t()[None],
    "with a causal one": lambda seen: (
        torch.where(seen, torch.zeros(()), -1e9) + torch.full((SIZE, SIZE), -1e9).triu(1)
    ),
}
INFINITE = {
    "filled": lambda seen: torch.zeros_like(seen, dtype=torch.float32).masked_fill(
        ~seen, -torch.inf
    ),
    "causal": lambda seen: torch.full((SIZE, SIZE), -torch.inf).triu(1),
}
OTHERS = {
    "distances": lambda seen: seen.to(torch.float32).cumsum(1),
    "small numbers": lambda seen: torch.where(seen, torch.zeros(()), -5.3),
    "not far enough": lambda seen: torch.where(seen, torch.zeros(()), -1e7),
    "places": lambda seen: seen.to(torch.float32) * 1.7,
    "shares": lambda seen: (1.0 - 0.3 * seen.to(torch.float32)) * -1e9,
    "written to": written,
    "a constant": lambda seen: torch.tensor([[0.3, MIN] * 4]),
    "near a mask": lambda seen: torch.where(seen, torch.full((), 0.3), MIN),
}
CASES = {**FINITE, **{f"infinite, {name}": mask for name, mask in INFINITE.items()}}


def attended(mask, seen: Tensor, dtype: str, level: str = "balanced") -> Rewritten:
    def function(x: Tensor, w: Tensor, seen: Tensor) -> Tensor:
        scores = x @ w
        return torch.softmax(scores + mask(seen), -1) @ w

    result = run(function, X, W, seen, policy=Policy(dtype, level=level))
    expected = function(X, W, seen)
    torch.testing.assert_close(result(X, W, seen), expected, rtol=0.02, atol=0.02)
    return result


def are_low(result: Rewritten) -> bool:
    """Whether the masked scores are, and what the softmax makes of them."""
    (sums,) = [f.name for f in result.plan.facts.values() if "allow1" in f.operands]
    (softmax,) = [f.name for f in result.plan.facts.values() if f.op == "aten.softmax.int"]
    assert result.is_low(sums) is result.is_low(softmax)
    return result.is_low(sums)


@pytest.mark.parametrize("name", CASES)
def test_masked_scores_stay_low_in_bfloat16(name):
    for seen in (SEEN, PADDED):
        assert are_low(attended(CASES[name], seen, "bfloat16"))
    assert not are_low(attended(CASES[name], SEEN, "bfloat16", level="safe"))


@pytest.mark.parametrize("name", CASES)
def test_in_float16_only_what_is_infinite_is_far_from_all_scores(name):
    assert are_low(attended(CASES[name], SEEN, "float16")) is name.startswith("infinite")


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_mask_is_added_in_float32(name):
    assert not are_low(attended(OTHERS[name], SEEN, "bfloat16"))


@pytest.mark.parametrize("name", FINITE)
def test_a_row_that_sees_nothing_is_as_in_float32(name):
    attended(FINITE[name], BLIND, "bfloat16")


def test_a_number_beyond_float32_stays_what_it_is():
    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w) * 1e300

    result = run(function, X, W, policy=Policy("bfloat16"))
    assert torch.equal(result(X, W), function(X, W)) and result(X, W).isinf().all()


def test_masks_of_scores_that_are_returned_keep_their_numbers():
    def function(x: Tensor, w: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        scores = x @ w
        added = scores + torch.where(seen, torch.zeros(()), MIN)
        return added, scores.masked_fill(~seen, MIN)

    result = run(function, X, W, SEEN, policy=Policy("bfloat16"))
    for ours, float32 in zip(result(X, W, SEEN), function(X, W, SEEN), strict=True):
        assert torch.equal(ours[~SEEN], float32[~SEEN])


@pytest.mark.parametrize("fill", ["masked_fill", "where"])
def test_scores_are_filled_in_low_precision(fill):
    """With a number that bfloat16 does not have, which saturates."""

    def function(x: Tensor, w: Tensor, seen: Tensor) -> Tensor:
        scores = x @ w
        masked = {"masked_fill": lambda: scores.masked_fill(~seen, MIN)}
        masked["where"] = lambda: torch.where(seen, scores, MIN)
        return masked[fill]().softmax(-1) @ w

    for seen in (SEEN, PADDED, BLIND):
        result = run(function, X, W, seen, policy=Policy("bfloat16"))
        assert are_low(result)
        expected = function(X, W, seen)
        torch.testing.assert_close(result(X, W, seen), expected, rtol=0.02, atol=0.02)
    for policy in (Policy("bfloat16", level="safe"), Policy("float16")):
        assert not are_low(run(function, X, W, SEEN, policy=policy))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("far", [-1e9, MIN])
def test_what_is_infinite_is_further_away_than_any_number(dtype, far):
    """The first token is padded, and all that its row sees: it attends to itself none the less."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        padded = (torch.arange(SIZE) == 0).to(torch.float32) * far
        mask = torch.full((SIZE, SIZE), -torch.inf).triu(1) + padded
        q, k = ((x @ w)[None, None] for w in (w, w.t()))
        attended = F.scaled_dot_product_attention(q, k, q, attn_mask=mask[None, None])
        return attended, (q + mask).softmax(-1) @ w

    result = run(function, X, W, policy=Policy(dtype))
    assert far == -1e9 or any(cast.saturate for cast in result.plan.casts)
    for ours, float32 in zip(result(X, W), function(X, W), strict=True):
        torch.testing.assert_close(ours, float32, rtol=0.02, atol=0.02)


def test_what_overflows_float32_is_not_hidden_by_saturation():
    def function(x: Tensor, w: Tensor) -> Tensor:
        return (((x @ w).exp() * 1e30) ** 2) @ (w / 1024)

    result = run(function, X, W, policy=Policy("float16"))
    assert any(cast.saturate for cast in result.plan.casts)
    assert not function(X, W).isfinite().any() and not result(X, W).isfinite().any()
