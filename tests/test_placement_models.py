"""Where the casts of real models fall, beside a greedy fill and beside autocast by CUDA's rules.

scripts/placement_report.py prints the same comparison for every model of the zoo.
"""

from __future__ import annotations

import pytest
import torch
import zoo
from cuda_autocast import autocast_casts
from graphs import SIZE, W, X, capture, chain, rewritten
from grappler import OUTPUT, bytes_moved, compare, excess, greedy_fill, our_casts, unexplained

pytestmark = pytest.mark.usefixtures("whole_models")
CASES = {case.name: case for case in zoo.cases()}
BELOW_AUTOCAST = "unet lstm bert llama swin attention gpt2".split()
ABOVE_AUTOCAST = {  # what autocast does without; what `unexplained` leaves out of account
    "autoencoder": "the output stays float32",
    "convnet": "the output stays float32",
    "checkpointed": "a checkpointed body takes and returns float32; the output stays float32",
    "own_autocast": "the output stays float32",
    "deberta_v2": "residuals and scores add float32 to low precision",
}
MATRIX = SIZE * SIZE * (4 + 2)  # bytes of casting one


@pytest.mark.parametrize("name", [*BELOW_AUTOCAST, *ABOVE_AUTOCAST])
def test_never_more_bytes_than_greedy_and_above_autocast_only_for_a_reason(name: str) -> None:
    case = CASES[name]
    found = compare(case.make(), *case.batch(0, 0))
    assert not found.fallbacks
    assert found.moved <= found.greedy_moved
    above = found.ours.bytes > found.autocast.bytes
    assert above == (name in ABOVE_AUTOCAST), excess(found.ours, found.autocast)
    assert unexplained(found.ours, found.autocast) <= 0, excess(found.ours, found.autocast)


def casts_under_autocast(function, weights: int = 1) -> list[tuple[str, int]]:
    found = autocast_casts(capture(function, X, W, weights=weights), torch.bfloat16)
    assert found.bytes == sum(found.by_op.values())
    return [(op, size // MATRIX) for op, size in found.by_op.items()]


def test_the_replay_follows_the_rules_of_autocast_on_cuda() -> None:
    assert casts_under_autocast(lambda x, w: x @ w) == [("aten.matmul.default", 2)]
    assert casts_under_autocast(lambda x, w: x + w) == []
    norm = casts_under_autocast(lambda x, w: torch.layer_norm(x @ w, (SIZE,)))
    assert norm == [("aten.matmul.default", 2), ("aten.layer_norm.default", 1)]


def test_the_replay_casts_a_weight_once_and_other_values_each_time() -> None:
    assert casts_under_autocast(lambda x, w: (x @ w) @ w) == [("aten.matmul.default", 2)]
    twice = [("aten.matmul.default", 4)]
    assert casts_under_autocast(lambda x, w: (x @ w) + (x @ w), weights=0) == twice


def test_the_replay_leaves_to_kernels_what_they_widen_themselves() -> None:
    total = casts_under_autocast(lambda x, w: (x @ w).sum(-1))
    assert total == [("aten.matmul.default", 2)]
    mixed = casts_under_autocast(lambda x, w: x + x @ w)
    assert mixed == [("aten.matmul.default", 2)]


def test_an_output_cast_is_told_apart() -> None:
    captured = capture(lambda x, w: torch.relu(x @ w), X, W, weights=1)
    ours = our_casts(rewritten(captured).plan)
    theirs = autocast_casts(captured, torch.bfloat16)
    assert excess(ours, theirs) == {OUTPUT: MATRIX}
    assert unexplained(ours, theirs) == 0


@pytest.mark.parametrize(
    ("spelling", "low"),
    [
        ("wgcw", "WGCW"),
        ("wgbgw", "WgbgW"),  # b denies what follows it
        ("wcg", "WCg"),  # infer that leads nowhere stays; clear beside low does not
        ("bcw", "bCW"),
        ("gcb", "gcb"),
    ],
)
def test_the_greedy_fill_is_that_of_grappler(spelling: str, low: str) -> None:
    plan = rewritten(chain(spelling)).plan
    chosen = greedy_fill(plan.facts, plan.paints)
    steps = [n for n in plan.facts if n.rstrip("0123456789") in ("allow", "infer", "clear", "deny")]
    cases = [s.upper() if n in chosen else s for n, s in zip(steps, spelling, strict=False)]
    assert "".join(cases) == low
    assert bytes_moved(plan, plan.low)[1] <= bytes_moved(plan, chosen)[1]
