"""The loss scale as a state machine, against a model in plain Python and against GradScaler."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_graph import LossScale, Policy, PolicyError
from amp_graph.scaling.loss_scale import save_state

YES, NO = torch.tensor(1.0), torch.tensor(0.0)
OVERFLOWS = st.lists(st.booleans(), max_size=60)
POWERS = st.integers(-14, 24).map(lambda e: 2.0**e)


@st.composite
def loss_scales(draw: Any) -> LossScale:
    floor, init, ceiling = sorted([draw(POWERS), draw(POWERS), draw(POWERS)])
    return LossScale(
        init,
        growth_factor=draw(st.sampled_from([1.0, 1.5, 2.0, 4.0])),
        backoff_factor=draw(st.sampled_from([1.0, 0.7, 0.5, 0.25])),
        growth_interval=draw(st.integers(1, 5)),
        floor=floor,
        ceiling=ceiling,
        hysteresis=draw(st.integers(1, 3)),
    )


def by_hand(config: LossScale, overflows: list[bool]) -> list[tuple[float, int, int]]:
    """(scale, clean, skipped) after each step, in plain Python; scales are rounded to float32."""
    scale, clean, skipped, states = config.init_scale, 0, 0, []
    for overflow in overflows:
        if overflow:
            clean, skipped = 0, skipped + 1
            if skipped >= config.hysteresis:
                scale = float(np.float32(scale * config.backoff_factor))
        else:
            clean, skipped = clean + 1, 0
            if clean == config.growth_interval:
                scale, clean = float(np.float32(scale * config.growth_factor)), 0
        scale = min(max(scale, config.floor), config.ceiling)
        states.append((scale, clean, skipped))
    return states


@given(loss_scales(), OVERFLOWS)
@settings(max_examples=150, deadline=None)
def test_follows_the_model_in_plain_python(config: LossScale, overflows: list[bool]) -> None:
    state = config.start()
    for overflow, expected in zip(overflows, by_hand(config, overflows), strict=True):
        before = [float(v) for v in state]
        new = config.adjust(state, YES if overflow else NO)
        assert [float(v) for v in state] == before, "a state is never written to"
        assert tuple(map(float, new)) == expected
        assert [v.dtype for v in new] == [torch.float32, torch.int32, torch.float32]
        assert all(v.ndim == 0 for v in new)
        state = new


@given(loss_scales(), OVERFLOWS, st.sets(st.integers(0, 59)))
@settings(max_examples=100, deadline=None)
def test_clean_steps_that_do_not_count_might_not_have_been(
    config: LossScale, overflows: list[bool], uncounted: set[int]
) -> None:
    state = config.start()
    left_out = [i for i in uncounted if i < len(overflows) and not overflows[i]]
    for i, overflow in enumerate(overflows):
        state = config.adjust(state, YES if overflow else NO, counts=i not in uncounted)
    counted = [overflow for i, overflow in enumerate(overflows) if i not in left_out]
    expected = by_hand(config, counted)[-1:] or [tuple(map(float, config.start()))]
    assert tuple(map(float, state)) == expected[0]


@given(loss_scales(), OVERFLOWS)
@settings(max_examples=100, deadline=None)
def test_stays_between_floor_and_ceiling(config: LossScale, overflows: list[bool]) -> None:
    state = config.start()
    for overflow in overflows:
        state = config.adjust(state, YES if overflow else NO)
        assert config.floor <= float(state.scale) <= config.ceiling
        assert 0 < float(1 / state.scale) < math.inf


@pytest.mark.parametrize("init_scale", [2.0**16, 3.0, 1.0])
@given(overflows=OVERFLOWS, interval=st.integers(1, 4), growth=st.sampled_from([1.5, 2.0, 3.0]))
@settings(max_examples=60, deadline=None)
def test_is_torch_s_update_where_bounds_do_not_bind(
    init_scale: float, overflows: list[bool], interval: int, growth: float
) -> None:
    config = LossScale(init_scale, growth, 0.5, interval, floor=2.0**-80, ceiling=2.0**100)
    state = config.start()
    scale, tracker = torch.tensor(init_scale), torch.tensor(0, dtype=torch.int32)
    for overflow in overflows:
        found = YES if overflow else NO
        torch._amp_update_scale_(scale, tracker, found, growth, 0.5, interval)
        state = config.adjust(state, found)
        assert float(state.scale) == float(scale)
        assert int(state.clean) == int(tracker)


def test_defaults_are_grad_scaler_s() -> None:
    theirs, ours = torch.amp.GradScaler("cpu").state_dict(), LossScale()
    assert save_state(ours, ours.start()) == theirs | {"skipped_in_a_row": 0}


def test_static_never_changes() -> None:
    config = LossScale.static(1024.0)
    state = config.start()
    for overflow in [NO] * 3000 + [YES] * 50:
        state = config.adjust(state, overflow)
    assert float(state.scale) == 1024.0
    assert int(state.skipped) == 50
    assert Policy(loss_scale=1024).loss_scale == config


def test_hysteresis_bears_overflows_that_are_not_in_a_row() -> None:
    config = LossScale(1024.0, hysteresis=3)
    state = config.start()
    for overflow in [YES, YES, NO] * 20:
        state = config.adjust(state, overflow)
    assert float(state.scale) == 1024.0
    scales = []
    for _ in range(4):
        state = config.adjust(state, YES)
        scales.append(float(state.scale))
    assert scales == [1024.0, 1024.0, 512.0, 256.0]


def test_grows_after_the_interval_and_not_before() -> None:
    config = LossScale(8.0, growth_interval=2000)
    state = config.start()
    for _ in range(1999):
        state = config.adjust(state, NO)
    assert (float(state.scale), int(state.clean)) == (8.0, 1999)
    state = config.adjust(state, NO)
    assert (float(state.scale), int(state.clean)) == (16.0, 0)


def test_bfloat16_has_no_scale_unless_asked_for() -> None:
    assert Policy().loss_scale_for(torch.bfloat16) is None
    assert Policy().loss_scale_for(torch.float16) == LossScale()
    assert Policy(loss_scale=None).loss_scale_for(torch.float16) is None
    assert Policy(loss_scale=8).loss_scale_for(torch.bfloat16) == LossScale.static(8.0)


@pytest.mark.parametrize(
    "arguments",
    [
        *({name: value} for name, value in itertools.product(
            ["init_scale", "growth_factor", "backoff_factor", "floor", "ceiling"],
            [0, -1.0, math.nan, math.inf, "1", None],
        )),
        *({name: value} for name, value in itertools.product(
            ["growth_interval", "hysteresis", "abort_after"], [0, -1, 2.5, True, "1"]
        )),
        {"growth_factor": 0.5},
        {"backoff_factor": 2.0},
        {"init_scale": 2.0**30},
        {"init_scale": 2.0**-20},
        {"floor": 8.0, "ceiling": 4.0, "init_scale": 6.0},
        {"growth_interval": None},
    ],
    ids=str,
)  # fmt: skip
def test_bad_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(PolicyError):
        LossScale(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [{"floor": 1e-50}, {"floor": 1e-40}, {"ceiling": 1e39}],
    ids=["floor rounds to 0", "1/floor is infinite", "ceiling is infinite"],
)
def test_bounds_that_float32_cannot_hold(arguments: dict[str, Any]) -> None:
    with pytest.raises(PolicyError):
        LossScale(**arguments)


@pytest.mark.parametrize("loss_scale", ["static", True, 0, -2.0, math.nan, object()])
def test_a_policy_s_loss_scale_that_makes_no_sense(loss_scale: Any) -> None:
    with pytest.raises(PolicyError):
        Policy(loss_scale=loss_scale)
