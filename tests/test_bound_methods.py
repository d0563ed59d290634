"""Methods of containers whose arguments end a graph: `seen.append(lengths.tolist())`."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Net(nn.Module):
    """Fills a container, in code that is in no other function."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(8, 8), kind
        self.seen: Any = {"update": dict, "a deque": deque}.get(kind, list)()

    def forward(self, x: Tensor) -> tuple[Tensor, Any, Tensor]:
        x = self.layer(x).relu()
        sums = x.sum(1)
        seen = copy.copy(self.seen)
        if self.kind == "append":
            seen.append(sums.tolist())
        elif self.kind == "extend":
            seen.extend(sums.tolist())
        elif self.kind == "update":
            seen.update(sums=sums.tolist())
        else:
            seen.appendleft(sums.tolist())
        return self.layer(x) + len(seen), seen, sums


def expected(kind: str, sums: list[float]) -> Any:
    contents = {
        "append": [sums],
        "extend": sums,
        "update": {"sums": sums},
        "a deque": deque([sums]),
    }
    return contents[kind]


@pytest.mark.parametrize("kind", ["append", "extend", "update", "a deque"])
def test_what_is_behind_is_captured_once(kind: str) -> None:
    model = amp_graph.convert(Net(kind), policy="bfloat16")
    graphs = []
    for _ in range(6):
        result, seen, sums = model(torch.randn(4, 8))
        result.sum().backward()
        assert seen == expected(kind, sums.tolist())
        graphs.append(len(amp_graph.plans(model)))
    assert graphs[2] == graphs[-1] <= 4


class Chosen(nn.Module):
    """Either method, of either list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.first, self.method = nn.Linear(8, 8), True, "append"

    def forward(self, x: Tensor) -> tuple[Tensor, list[Any], list[Any]]:
        x = self.layer(x)
        one: list[Any] = [1.0]
        other: list[Any] = [2.0, 3.0]
        getattr(one if self.first else other, self.method)(x[0].tolist())
        return self.layer(x), one, other


@pytest.mark.filterwarnings("error:.*under autocast")
def test_another_method_or_container_is_captured_anew() -> None:
    model = amp_graph.convert(Chosen(), policy="bfloat16")
    for _ in range(2):
        for model.first in (True, False):
            for model.method in ("append", "extend"):
                _, one, other = model(torch.randn(2, 8))
                filled = one if model.first else other
                assert len(filled) - (1 if model.first else 2) == (
                    1 if model.method == "append" else 8
                )
                assert len(one) + len(other) - len(filled) == (2 if model.first else 1)


class Logging(nn.Module):
    """A list of its own that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.log = nn.Linear(8, 8), []

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        self.log.append(x.sum(1).tolist())
        return self.layer(x)


@pytest.mark.filterwarnings("error:.*under autocast")
def test_a_list_of_the_model_is_written_once() -> None:
    model = amp_graph.convert(Logging(), policy="bfloat16")
    for count in range(1, 4):
        model(torch.randn(2, 8))
        assert len(model.log) == count
