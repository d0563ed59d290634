"""A model with lists and dictionaries that grow, called beside one without amp_graph."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from trees import assert_alike

import amp_graph

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


class Counted:
    times = -1

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, "times", self.times + 1)
        object.__setattr__(self, name, value)


class Net(nn.Module):
    """`use` is what the model does with its lists."""

    def __init__(self, use: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.body, self.head, self.use = nn.Linear(8, 8), nn.Linear(8, 2), use
        self.kept, self.other = [], []  # type: list[Any], list[Any]
        self.lists = [[], []]  # type: list[list[Any]]
        self.alias, self.pair, self.hook = self.kept, ([],), lambda *call: call[-1] * 2
        self.last = deque[Any](maxlen=3)
        self.by_name = defaultdict[str, list[Any]](list)
        self.by_number, self.numbered = dict[int, Any](), defaultdict[int, Any](list)
        self.calls, self.held, self.counted = 0, [2, 1], Counted()

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        h = self.body(x).relu()
        found = self.use(self, h)
        return self.head(h) if found is None else (self.head(h), found)


def pair(use: Callable[[Any, Tensor], Any], policy: Any = "bfloat16") -> tuple[Net, Net]:
    torch.manual_seed(0)
    plain = Net(use)
    return plain, amp_graph.convert(copy.deepcopy(plain), policy=policy)


def call(plain: Net, model: Net, times: int) -> None:
    for _ in range(times):
        ours, theirs = model(X), plain(X)
        assert_alike(ours, theirs)
        for each in (ours, theirs):
            (each[0] if isinstance(each, tuple) else each).sum().backward()
        for name in ("kept", "last", "alias", "by_number", "numbered", "lists"):
            assert_alike(getattr(model, name, 0), getattr(plain, name, 0))
        assert_alike(dict(model.by_name), dict(plain.by_name))
