"""A graph break inside of inlined functions is found once (`dynamo_changes.breaks_inside`)."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch.utils.checkpoint import checkpoint

import amp_graph
from amp_graph.dynamo_changes import breaks_inside

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Stages(nn.Module):
    """Layers, of which the last reads a number, deep inside of functions that are inlined."""

    def __init__(self, depth: int):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = Stages(depth - 1) if depth else nn.Linear(4, 4)
        self.is_deepest = not depth

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        if self.is_deepest:
            y = y + y.sum().item()
        return 2.0 * self.inner(y)


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Two()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1.0


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Three()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.cos()) + 2.0


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), Reads()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.stages(x))

    def stages(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x))


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2.0 if x.sum().item() > 0 else x
        return self.layer(x)


class InLoop(One):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.inner(x)
        return x


class Unrecorded(One):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = x + self.inner(x)
        return self.inner(x)


class Tried(One):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.inner(x)
        except ZeroDivisionError:
            return x


class Writes(nn.Module):
    """Breaks inside of a checkpoint, for a write that breaks nothing anywhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(4, 4), Seen()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return y + 1.0

    def block(self, x: Tensor) -> Tensor:
        return self.layer(self.seen(x).relu())


class Seen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.keep(x.sin())

    def keep(self, x: Tensor) -> Tensor:
        self.kept.append(x.detach())
        return x.cos()


def captures_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often Dynamo begins to capture functions of this name."""
    begun: Counter[str] = Counter()
    run = InstructionTranslatorBase.run

    def counted(frame: Any) -> None:
        begun[frame.f_code.co_qualname] += frame.f_code.co_name == name
        run(frame)

    monkeypatch.setattr(InstructionTranslatorBase, "run", counted)
    return begun


def expects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaks_inside._Expected, "take", lambda *_: False)


def test_what_lies_in_front_of_it_is_captured_as_often_as_it_has_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = captures_of("stages", monkeypatch)
    model = amp_graph.convert(One(), policy=amp_graph.Policy("bfloat16"))
    model(torch.randn(2, 4)).sum().backward()
    # From the outermost function, and from the one in whose graph it is.
    assert begun["Three.stages"] == 2


def test_that_is_once_more_for_each_function_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    expects_nothing(monkeypatch)
    begun = captures_of("stages", monkeypatch)
    model = amp_graph.convert(One(), policy=amp_graph.Policy("bfloat16"))
    model(torch.randn(2, 4)).sum().backward()
    assert begun["Three.stages"] == 5


KINDS = (One, InLoop, Unrecorded, Tried, Writes, lambda: Stages(0), lambda: Stages(4))


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_and_numbers_stay_what_they_are(
    kind: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = kind(), torch.randn(2, 4)
    other = copy.deepcopy(model)
    found = _operators(model, x)
    assert found
    torch._dynamo.reset()
    expects_nothing(monkeypatch)
    assert _operators(other, x) == found
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


def _operators(model: nn.Module, x: Tensor) -> list[list[str]]:
    """Train a step, and return the operators of each graph that is captured."""
    amp_graph.convert(model, policy=amp_graph.Policy("bfloat16"))
    model(x).sum().backward()
    return [[facts.op for facts in plan.facts.values()] for plan in amp_graph.plans(model)]


def test_another_call_is_not_expected_to_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was seen of one call is forgotten with it, whether or not it came to that."""
    expects_nothing(monkeypatch)
    model = amp_graph.convert(One(), policy=amp_graph.Policy("bfloat16"))
    model(torch.randn(2, 4))
    assert breaks_inside._expected.places == []


def test_nor_one_behind_a_call_that_raises() -> None:
    class Raises(One):
        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            if y.requires_grad:
                raise ZeroDivisionError
            return y

    model = amp_graph.convert(Raises(), policy=amp_graph.Policy("bfloat16"))
    with pytest.raises(ZeroDivisionError):
        model(torch.randn(2, 4))
    assert breaks_inside._expected.places == []


class Sets(nn.Module):
    """Of sets with one element a graph ends, but not in a function that is captured first."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.last = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4)

    def forward(self, sets: list[Tensor]) -> Tensor:
        return self.last(torch.stack(self.each(sets)))

    def each(self, sets: list[Tensor]) -> list[Tensor]:
        return [self.part(one).sum(0) for one in sets]


def test_where_sizes_vary_a_function_is_captured_before_it_is_known_to_break() -> None:
    model = amp_graph.convert(Sets(), policy=amp_graph.Policy("bfloat16"))
    for lengths in ((4, 2, 2), (4, 2, 3), (2, 5, 5), (5, 4, 1), (5, 5, 3), (1, 3, 4)):
        model([torch.randn(length, 4) for length in lengths]).sum().backward()
    assert not any(plan.fallback for plan in amp_graph.plans(model))
