"""By what a model is called goes from one state to another in few ways."""

from __future__ import annotations

import pytest
from several_threads import Net

import amp_graph
from amp_graph.calls.call_path import CAPTURED, LEAVING, LEFT, STALE, CallPath, State
from amp_graph.calls.conversion import conversion_of
from amp_graph.modules import CALL


@pytest.fixture
def path() -> CallPath:
    model = amp_graph.convert(Net(), policy="bfloat16")
    return conversion_of(model)._calls[CALL]._path


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
    path: CallPath, before: State, anew: State, back: State, again: State
) -> None:
    path.leave_for(own_code)
    assert path.state is LEAVING

    def comes_to(expected: State) -> bool:
        came, path.state = path.state, before
        return came is expected

    path.state = before
    path.capture_anew()
    assert comes_to(anew)
    path.go_back(for_good=False)
    assert comes_to(back)
    path.leave_again()
    assert comes_to(again)
    path.go_back(for_good=True)
    assert comes_to(back)
    path.leave_again()
    assert comes_to(before)
    for at_once, expected in ((True, LEFT), (False, LEAVING)):
        path.end_with(own_code, at_once)
        assert comes_to(expected)


def test_from_other_own_code_none_goes_back(path: CallPath) -> None:
    path.leave_for(own_code)
    path.end_with(other_code, at_once=True)
    path.go_back(for_good=False)
    assert path.state is LEFT and path.fallback is other_code


def test_own_code_stays_for_a_call_that_is_about_to_run_it(path: CallPath) -> None:
    path.leave_for(own_code)
    path.go_back(for_good=True)
    assert path.state is STALE and path.fallback is own_code
