"""The way back from code under autocast to the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from amp_graph.calls.or_else import or_else
from amp_graph.modules import Run


class Calls:
    """What `or_else` makes of code that raises, and of other code; and what became of it."""

    def __init__(self, run: Run, other: Run, model: nn.Module | None = None):
        self.made, self.reports = 0, list[str]()
        self.passed_on: set[type[Exception]] = set()
        self._other = other
        self.call = or_else(run, self._make_other, self.reports.append, model, self.passed_on)

    def _make_other(self) -> Run:
        self.made += 1
        return self._other


def raising(error: Exception) -> Callable[..., Any]:
    def run(*_: Any) -> Any:
        raise error

    return run


def test_from_an_error_on_the_other_code_runs() -> None:
    errors = iter([None, RuntimeError("no kernel")])

    def run(x: int) -> int:
        if (error := next(errors)) is not None:
            raise error
        return x

    calls = Calls(run, lambda x: -x)
    assert [calls.call(x) for x in (1, 2, 3)] == [1, -2, -3]
    assert calls.made == 1 and ["no kernel" in report for report in calls.reports] == [True]


def test_an_error_of_both_is_the_user_s_and_the_next_call_is_as_ever() -> None:
    fails = [True]

    def run(_: int) -> str:
        if fails[0]:
            raise RuntimeError("of autocast")
        return "autocast"

    calls = Calls(run, raising(RuntimeError("of the user")))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="of the user"):
            calls.call(1)
    fails[0] = False
    assert calls.call(1) == "autocast"
    assert calls.made == 1 and not calls.reports


class Control(Exception):
    """By which a script ends calls."""


@pytest.mark.parametrize(
    ("one", "other", "is_for_control"),
    [
        (Control(), Control(), True),
        (Control(), ValueError(), False),
        (RuntimeError(), RuntimeError(), False),
        (TypeError(), TypeError(), False),
    ],
)
def test_errors_that_a_script_ends_calls_by_are_raised_at_once(
    one: Exception, other: Exception, is_for_control: bool
) -> None:
    ran: list[str] = []
    calls = Calls(raising(one), lambda _: ran.append("other") or raising(other)())
    for _ in range(3):
        with pytest.raises(type(other)):
            calls.call(1)
    assert len(ran) == (1 if is_for_control else 3)
    assert calls.passed_on == ({Control} if is_for_control else set())


def test_what_no_other_code_mends_is_raised_at_once() -> None:
    calls = Calls(raising(torch.OutOfMemoryError()), lambda _: "other")
    with pytest.raises(torch.OutOfMemoryError):
        calls.call(1)
    assert calls.made == 0


class Counting(nn.Module):
    """Counts its calls, of which some then raise."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def run(self, raises: bool) -> None:
        self.calls += 1
        if raises:
            raise RuntimeError("no kernel")


@pytest.mark.parametrize(("given", "counted"), [([True], 1), ([False, True], 3)])
def test_what_a_first_call_did_to_the_model_is_undone(given: list[bool], counted: int) -> None:
    model = Counting()
    calls = Calls(model.run, lambda _: model.run(False), model)
    for raises in given:
        calls.call(raises)
    assert model.calls == counted


def test_inside_of_a_transform_nothing_is() -> None:
    """What the model holds there cannot be read."""
    model = Counting()
    calls = Calls(lambda x: model.run(True), lambda x: model.calls * 2, model)

    def called(x: torch.Tensor) -> Any:
        model.calls = x.clone()
        return calls.call(x)

    assert torch.vmap(called)(torch.arange(3.0)).tolist() == [2, 4, 6]
