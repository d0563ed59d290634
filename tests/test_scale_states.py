"""The state of a loss scale in checkpoints: saved, loaded, taken from a GradScaler, damaged."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from test_loss_scale import NO, OVERFLOWS, YES
from training import scaled

import amp_graph
from amp_graph import CheckpointError, GradScaler, LossScale
from amp_graph.scaling.graph_scale import GraphScale
from amp_graph.scaling.loss_scale import load_state, save_state

MODEL = torch.nn.Linear(1, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters())


def graph_scale(config: LossScale) -> GraphScale:
    return GraphScale(config, MODEL.parameters)


def stepped(scaler: Any, overflows: list[bool]) -> Any:
    """A scaler, ours or PyTorch's, after steps with and without overflow."""
    parameter = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for overflow in overflows:
        scaler.scale(torch.ones(()))  # torch's makes its scale at the first call
        parameter.grad = torch.tensor(math.inf if overflow else 1.0)
        scaler.step(optimizer)
        scaler.update()
    return scaler


@given(OVERFLOWS, OVERFLOWS)
@settings(max_examples=25, deadline=None)
def test_a_state_goes_on_where_it_was_saved(before: list[bool], after: list[bool]) -> None:
    config = LossScale(2.0**10, growth_interval=3, hysteresis=2)
    for split in (before, before + after):
        scale = graph_scale(config)
        for overflow in split:
            scale.stepped(YES if overflow else NO, OPTIMIZER)
            scale.begin_forward(True)
        if split is before:
            saved = scale.state_dict()
    resumed = graph_scale(config)
    resumed.load_state_dict(saved)
    for overflow in after:
        resumed.stepped(YES if overflow else NO, OPTIMIZER)
        resumed.begin_forward(True)
    assert resumed.state_dict() == scale.state_dict()


def test_a_step_that_was_not_followed_by_a_forward_is_in_the_state() -> None:
    scale = graph_scale(LossScale())
    scale.stepped(YES, OPTIMIZER)
    assert scale.state_dict()["scale"] == scale.get_scale() == 2.0**15


def test_a_round_that_a_state_is_loaded_in_is_over() -> None:
    scale, both = graph_scale(LossScale(2.0**10)), (OPTIMIZER, torch.optim.SGD(MODEL.parameters()))
    saved = scale.state_dict()
    for found_inf in (YES, YES):
        scale.begin_forward(True)
        for optimizer in both:
            scale.begin_step(optimizer)
            scale.stepped(found_inf, optimizer)
        assert scale.get_scale() == 2.0**9  # it is lowered once for both
        skips = scale.skips
        scale.load_state_dict(saved)
        assert scale.get_scale() == 2.0**10 and scale.skips == skips
    assert skips == 2


@pytest.mark.usefixtures("fresh_dynamo", "no_other_scales")
def test_an_overflow_before_a_state_was_loaded_is_none_of_the_gradients_in_the_same_place() -> None:
    model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp_graph.convert(model, optimizer, policy=scaled(2.0**10))
    saved = optimizer.state_dict()
    for load, has_stepped in [(False, True), (True, False), (False, True)]:
        loss = model(x).sum() * (1.0 if has_stepped else 1e38)
        loss.backward()
        assert optimizer.step() is has_stepped
        if load:
            optimizer.load_state_dict(saved)
            optimizer.zero_grad(set_to_none=False)
        else:
            optimizer.zero_grad()


@given(OVERFLOWS, OVERFLOWS)
@settings(max_examples=25, deadline=None)
def test_states_move_to_and_from_grad_scaler(before: list[bool], after: list[bool]) -> None:
    def theirs() -> Any:
        return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)

    bounds = {"floor": 2.0**-80, "ceiling": 2.0**100}
    whole = stepped(theirs(), before + after).state_dict()
    for first, second in [
        (theirs(), GradScaler(growth_interval=7, **bounds)),
        (GradScaler(init_scale=2.0**10, growth_interval=3, **bounds), theirs()),
        (GradScaler(init_scale=2.0**10, growth_interval=3, **bounds), GradScaler(**bounds)),
    ]:
        second.load_state_dict(stepped(first, before).state_dict())
        state = stepped(second, after).state_dict()
        assert {key: state[key] for key in whole} == whole


GOOD = save_state(LossScale(), LossScale().start())
DAMAGED: dict[str, Any] = {
    **{f"without {key}": {k: v for k, v in GOOD.items() if k != key}
       for key in GOOD if key != "skipped_in_a_row"},
    "empty, as of a disabled GradScaler": {},
    "not a mapping": [1, 2],
    "None": None,
    **{f"{key}={value!r}": GOOD | {key: value} for key, value in [
        ("scale", math.nan), ("scale", math.inf), ("scale", 0.0), ("scale", -1.0),
        ("scale", "65536"), ("scale", None),
        ("_growth_tracker", -1), ("_growth_tracker", 1.5), ("_growth_tracker", None),
        ("_growth_tracker", 2**31),
        ("skipped_in_a_row", -1), ("skipped_in_a_row", "1"),
        ("growth_factor", 0.5), ("growth_factor", math.nan), ("growth_factor", "2"),
        ("backoff_factor", 2.0), ("backoff_factor", 0.0),
        ("growth_interval", 0), ("growth_interval", 1.5), ("growth_interval", None),
    ]},
}  # fmt: skip


@pytest.mark.parametrize("damaged", DAMAGED.values(), ids=DAMAGED.keys())
@pytest.mark.parametrize("kind", [GraphScale, GradScaler])
def test_a_damaged_state_is_refused_and_changes_nothing(kind: Any, damaged: Any) -> None:
    scale = graph_scale(LossScale(2.0**8)) if kind is GraphScale else GradScaler(init_scale=2.0**8)
    before = scale.state_dict()
    with pytest.raises(CheckpointError):
        scale.load_state_dict(damaged)
    assert scale.state_dict() == before


@pytest.mark.parametrize("kind", [GraphScale, GradScaler])
@pytest.mark.parametrize(("saved", "loaded"), [(2.0**40, 2.0**24), (2.0**-20, 2.0**-14)])
def test_a_scale_that_outgrew_the_bounds_goes_on_from_there(kind, saved, loaded) -> None:
    """torch.amp.GradScaler knows none."""
    scale = graph_scale(LossScale()) if kind is GraphScale else GradScaler()
    scale.load_state_dict(
        torch.amp.GradScaler("cpu", init_scale=saved).state_dict() | {"scale": saved}
    )
    assert scale.get_scale() == loaded


def test_an_explicit_scaler_begins_where_it_is_told_to() -> None:
    for begin in (2.0**30, 2.0**-20):
        assert GradScaler(init_scale=begin).get_scale() == begin


def test_bounds_are_the_policy_s_and_factors_the_checkpoint_s() -> None:
    mine = LossScale(floor=4.0, ceiling=2.0**20, hysteresis=2, abort_after=7)
    saved = {
        "scale": 8.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 10,
        "_growth_tracker": 9,
    }
    config, state = load_state(mine, saved)
    assert config == LossScale(2.0**16, 4.0, 0.25, 10, 4.0, 2.0**20, 2, 7)
    assert [float(v) for v in state] == [8.0, 9.0, 0.0]
    assert float(config.adjust(state, NO).scale) == 32.0
