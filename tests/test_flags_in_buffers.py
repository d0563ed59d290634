"""Branches on flags that modules keep in buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

FLAGS = {
    "boolean": torch.tensor(False),
    "number": torch.zeros(1),
    "counter": torch.tensor(0),
}


class ActNorm(nn.Module):
    """Its scale is that of the first batch."""

    flag: Tensor
    scale: Tensor

    def __init__(self, flag: Tensor) -> None:
        super().__init__()
        self.register_buffer("flag", flag.clone())
        self.register_buffer("scale", torch.ones(8))

    def start(self, x: Tensor) -> None:
        if self.flag:
            return
        self.scale.copy_(1 / x.detach().std(0))
        self.flag.data.fill_(1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.flag:
            self.start(x)
        return x * self.scale


class Normed(nn.Module):
    """Calls it `times` times, as vector quantizers do that share a codebook."""

    def __init__(self, flag: Tensor, times: int = 1) -> None:
        super().__init__()
        self.layer, self.norm, self.times = nn.Linear(8, 8), ActNorm(flag), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.norm(self.layer(x))
        return self.layer(x)


def _step_beside(model: nn.Module, plain: nn.Module) -> None:
    x = torch.randn(16, 8)
    found, expected = model(x), plain(x)
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)
    torch.testing.assert_close(model.norm.scale, plain.norm.scale, rtol=0.1, atol=0.1)
    assert torch.equal(model.norm.flag, plain.norm.flag)
    found.sum().backward()


@pytest.mark.parametrize("flag", FLAGS.values(), ids=FLAGS.keys())
def test_there_is_a_graph_for_each_answer(flag: Tensor) -> None:
    plain = Normed(flag)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for _ in range(3):
        _step_beside(model, plain)
    for each in (model, plain):
        each.norm.flag.zero_()
    for _ in range(3):
        _step_beside(model, plain)
    assert len(amp_graph.plans(model)) == 2
    assert "graph break" not in str(amp_graph.explain(model))


class Counting(ActNorm):
    """Counts its calls in the flag, and asks a question of that number."""

    def __init__(self, ask: Callable[[Tensor], Tensor | bool]) -> None:
        super().__init__(torch.tensor(0.0))
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale if self.ask(self.flag) else -x
        self.flag.add_(1)
        return x


QUESTIONS: dict[str, Callable[[Tensor], Tensor | bool]] = {
    "equal": lambda flag: flag == 0,
    "not equal": lambda flag: flag != 2,
    "not greater": lambda flag: not flag > 0.0,
    "at least": lambda flag: flag >= 3,
    "less": lambda flag: flag < 2,
    "not its item": lambda flag: not flag.item(),
    "its item": lambda flag: flag.item() >= 3,
    "not its truth": lambda flag: not bool(flag),
}


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS.keys())
def test_what_is_asked_of_the_number_is_asked_as_well(ask: Callable[[Tensor], bool]) -> None:
    plain = Normed(torch.tensor(0))
    plain.norm = Counting(ask)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for _ in range(5):
        _step_beside(model, plain)
    assert [plan.fallback for plan in amp_graph.plans(model)] == [None, None]
    assert "graph break" not in str(amp_graph.explain(model)).lower()


def test_what_is_asked_in_another_way_is_left_to_python() -> None:
    plain = Normed(torch.tensor(0))
    plain.norm = Counting(lambda flag: flag.eq(other=0))
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    with torch.device("cpu"):  # by whose mode the question is captured as a method
        for _ in range(3):
            _step_beside(model, plain)
    assert amp_graph.plans(model)[0].fallback is None


def test_one_that_the_graph_sets_is_asked_anew() -> None:
    plain = Normed(torch.tensor(False), times=3)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for _ in range(3):
        _step_beside(model, plain)
    calls = len(amp_graph.plans(model))
    _step_beside(model, plain)
    assert len(amp_graph.plans(model)) == calls


def test_numbers_that_are_no_flags_branch_as_ever() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("several", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            return x if self.several else -x

    model = amp_graph.convert(Several(), policy="bfloat16")
    with pytest.raises(RuntimeError, match="ambiguous"):
        model(torch.randn(2, 8))
