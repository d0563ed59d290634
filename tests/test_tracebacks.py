"""Tracebacks through a converted model are those of the model, but for a frame or two."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import amp_graph
from amp_graph.callers import is_ours
from amp_graph.calls.tracebacks import without_ours
from amp_graph.errors import PolicyError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.is_bad = nn.Linear(8, 2), False

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.is_bad:
            raise ValueError("bad")
        return y


def told(call: Callable[[], object]) -> list[tuple[str, str]]:
    """The files and functions of the traceback of what it raises."""
    with pytest.raises((ValueError, RuntimeError)) as raised:
        call()
    assert raised.value.__context__ is None
    frames = traceback.extract_tb(raised.value.__traceback__)
    return [(frame.filename, frame.name) for frame in frames]


@pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning")
@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize(("is_bad", "x"), [(True, X), (False, X[:, :5])])
def test_errors_of_a_model_show_its_own_frames(is_captured: bool, is_bad: bool, x: Tensor) -> None:
    plain, model = Net(), amp_graph.convert(Net(), policy="bfloat16")
    if is_captured:
        model(X)
    plain.is_bad = model.is_bad = is_bad
    found = told(lambda: model(x))
    ours = [name for file, name in found if is_ours(file)]
    assert ours == ["__call__", "call"]
    assert [frame for frame in found if not is_ours(frame[0])] == told(lambda: plain(x))


def test_errors_of_this_package_show_all_frames() -> None:
    with pytest.raises(PolicyError) as raised:
        amp_graph.Policy("float8")
    assert without_ours(raised.value.__traceback__) is raised.value.__traceback__


def test_a_traceback_of_nothing_is_nothing() -> None:
    assert without_ours(None) is None


@dataclass(frozen=True)
class EarlyExit(Exception):
    logits: Tensor


class LeavesEarly(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.is_bad:
            raise EarlyExit(y)
        return y


@pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning")
@pytest.mark.parametrize("is_captured", [False, True])
def test_an_error_that_nobody_may_write_to_comes_through(is_captured: bool) -> None:
    model = amp_graph.convert(LeavesEarly(), policy="bfloat16")
    if is_captured:
        model(X)
    model.is_bad = True
    for _ in range(2):
        with pytest.raises(EarlyExit) as raised:
            model(X)
        assert raised.value.logits.shape == (4, 2)
