"""Sizes that vary take PyTorch too long: each is captured apart from then on."""

from __future__ import annotations

import copy
import time
import warnings

import pytest
import torch
from torch import Tensor, nn

import amp_graph
from amp_graph import ConversionWarning
from amp_graph.capture.budget import MAX_CAPTURES
from amp_graph.convert import record_of
from amp_graph.dynamo_changes import slow_sizes

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question for a size is one too many."""
    monkeypatch.setattr("amp_graph.capture.budget.PATIENCE", 0.0)
    monkeypatch.setattr("amp_graph.capture.budget.TIMES", 0)


class Levels(nn.Module):
    """Pyramids of features, behind a graph break or not, and rows that are chosen by what is in
    them. It counts its calls."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.first, self.down = nn.Conv1d(4, 4, 3), nn.Conv1d(4, 4, 3, stride=2)
        self.breaks = breaks
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.calls += 1
        if self.breaks:
            torch._dynamo.graph_break()
        x = x[x[:, 0, 0] < 1e6]
        levels = [x, self.down(x), self.down(self.down(x))]
        flat = torch.cat([level.flatten(2) for level in levels], -1)
        return flat.view(flat.shape[0], -1).mean(-1)


@pytest.mark.parametrize("breaks", [False, True])
def test_each_size_is_captured_apart(breaks: bool) -> None:
    plain = Levels(breaks)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    sizes = [32, 40, 48, 32, 40, 56]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for size in sizes:
            x = torch.randn(2, 4, size)
            result, expected = model(x), plain(x)
            torch.testing.assert_close(result, expected, rtol=0.02, atol=0.02)
            result.sum().backward()
    texts = [str(each.message) for each in told if each.category is ConversionWarning]
    assert [("takes long over sizes" in text) for text in texts] == [True]
    assert model.calls == plain.calls
    assert len(amp_graph.plans(model)) == len({*sizes}) * (1 + breaks)
    assert all(plan.fallback is None for plan in amp_graph.plans(model))
    assert len({*record_of(model).breaks}) == breaks


def work(seconds: float) -> None:
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


def ask() -> bool:
    [around] = [change for _, name, change in slow_sizes.CHANGES if name == "evaluate_expr"]
    return around(lambda _: True, None)


def test_the_time_of_a_compiler_does_not_count() -> None:
    with slow_sizes.patience(0.2):
        with slow_sizes.untimed():
            work(0.3)
            assert ask()
        assert ask()
        work(0.3)
        with pytest.raises(slow_sizes.SizesTakeLong):
            ask()
    assert ask()


def test_of_many_sizes_the_model_is_left_to_autocast() -> None:
    model = amp_graph.convert(Levels(breaks=False), policy="bfloat16")
    with pytest.warns(ConversionWarning, match="captured anew again and again"):
        for size in range(32, 32 + MAX_CAPTURES + 1):
            model(torch.randn(2, 4, size))
