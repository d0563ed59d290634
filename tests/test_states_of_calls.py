"""By what a model is called goes from one state to another in few ways."""

from __future__ import annotations

import pytest
from several_threads import Net

import amp_graph
from amp_graph.calls.chosen import CAPTURED, LEAVING, LEFT, STALE, Chosen, State
from amp_graph.calls.conversion import conversion_of
from amp_graph.modules import CALL


@pytest.fixture
def chosen() -> Chosen:
    model = amp_graph.convert(Net(), policy="bfloat16")
    return conversion_of(model)._calls[CALL]._chosen


def own_code() -> None:
    pass


def other_code() -> None:
    pass


@pytest.mark.parametrize(
    ("before", "anew", "back", "again"),
    [
        (CAPTURED, STALE, CAPTURED, LEFT),
        (STALE, STALE, STALE, LEAVING),
        (LEAVING, LEAVING, STALE, LEAVING),
        (LEFT, LEFT, CAPTURED, LEFT),
    ],
)
def test_from_each_state(
    chosen: Chosen, before: State, anew: State, back: State, again: State
) -> None:
    chosen.leave_for(own_code)
    assert chosen.state is LEAVING

    def comes_to(expected: State) -> bool:
        came, chosen.state = chosen.state, before
        return came is expected

    chosen.state = before
    chosen.capture_anew()
    assert comes_to(anew)
    chosen.go_back(for_good=False)
    assert comes_to(back)
    chosen.leave_again()
    assert comes_to(again)
    chosen.go_back(for_good=True)
    assert comes_to(back)
    chosen.leave_again()
    assert comes_to(before)
    for at_once, expected in ((True, LEFT), (False, LEAVING)):
        chosen.end_with(own_code, at_once)
        assert comes_to(expected)


def test_from_other_own_code_none_goes_back(chosen: Chosen) -> None:
    chosen.leave_for(own_code)
    chosen.end_with(other_code, at_once=True)
    chosen.go_back(for_good=False)
    assert chosen.state is LEFT and chosen.fallback is other_code


def test_own_code_stays_for_a_call_that_is_about_to_run_it(chosen: Chosen) -> None:
    chosen.leave_for(own_code)
    chosen.go_back(for_good=True)
    assert chosen.state is STALE and chosen.fallback is own_code
