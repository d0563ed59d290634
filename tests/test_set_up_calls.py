"""First calls that tell nothing of later ones: what is said of them, and what stays of it."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import amp_graph

X = torch.linspace(-1, 1, 32).reshape(4, 8)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Target(nn.Module):
    """It makes its target network in its first call, as implementations of BYOL do."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.target: nn.Module | None = None

    def make_target(self) -> None:
        self.target = copy.deepcopy(self.online)
        for parameter in self.target.parameters():
            parameter.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        if self.target is None:
            self.target = copy.deepcopy(self.online)
            for parameter in self.target.parameters():
                parameter.requires_grad = False
        return self.online(x) - self.target(x)


class LateTarget(Target):
    """It has no attribute for it before, and its first call begins with a graph."""

    def __init__(self) -> None:
        super().__init__()
        del self.target

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.online(x)
        if not hasattr(self, "target"):
            self.make_target()
        return hidden - self.target(x)


def said_in(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("kind", [Target, LateTarget])
def test_a_call_that_makes_parts_tells_nothing_of_later_ones(kind: type[Target]) -> None:
    model = amp_graph.convert(kind(), policy="bfloat16")
    for _ in range(3):
        assert said_in(lambda: model(X).sum().backward()) == []
    assert [plan.fallback for plan in amp_graph.plans(model) if plan.fallback] == []
    assert "not captured" not in str(amp_graph.explain(model))


class ScaledByFirst(nn.Module):
    """Gives its scale other memory in its first call, of which no graph can be made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.register_buffer("is_set", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.is_set == 0:
            self.scale.data = (1 / (x.std(0) + 1)).data
            self.is_set = torch.tensor(1.0)
        return x * self.scale


def test_a_call_that_gives_parameters_their_values_is_not_told_of_as_all_there_is() -> None:
    model = amp_graph.convert(ScaledByFirst(), policy="bfloat16")
    said = said_in(lambda: model(X).sum().backward())
    assert not any(each.startswith("nothing of") for each in said)  # 2.15 captures that call
    assert said_in(lambda: model(X).sum().backward()) == []
    assert amp_graph.plans(model)[-1].has_low


class Forcing(nn.Module):
    """Which is never captured, and makes a part at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Linear(8, 8)
        try:
            return self.layer(x) if random.random() < 0.5 else self.layer(x).tanh()
        except ValueError:
            return x


def test_what_is_never_captured_is_told_of_at_the_second_call() -> None:
    model = amp_graph.convert(Forcing(), policy="bfloat16")
    assert said_in(lambda: model(X)) == []
    with pytest.raises(amp_graph.AmpGraphError, match="once more"):
        amp_graph.explain(model)
    (said,) = said_in(lambda: model(X))
    assert "from its next call on, runs under autocast: nothing is captured (" in said


class Counts(Forcing):
    """A count is no reason to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.calls = nn.Identity(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def test_a_model_that_counts_its_calls_is_told_of_at_once() -> None:
    model = amp_graph.convert(Counts(), policy="bfloat16")
    (said,) = said_in(lambda: model(X))
    assert "nothing is captured" in said
