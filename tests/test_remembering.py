"""Models that remember: in containers, in caches, in generators of random numbers of Python's."""

from __future__ import annotations

import collections
import functools
import os
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
KEY = "KEY_THAT_COMES_LATE"


class Remembering(nn.Module):
    """Its layer times `gain`. `change` comes before each call, `late` in the third and fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)
        nn.init.ones_(self.layer.weight)
        self.kept = self.begin()

    def begin(self) -> Any:
        return {}

    def change(self, call: int, late: bool) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.gain(x)

    def gain(self, x: Tensor) -> Any:
        raise NotImplementedError

    def seen(self) -> Any:
        return None


class Window(Remembering):
    def begin(self) -> Any:
        return collections.deque(maxlen=2)

    def gain(self, x: Tensor) -> Any:
        self.kept.append(x.mean())
        return torch.stack([*self.kept]).sum()

    def seen(self) -> Any:
        return len(self.kept)


class Left(Remembering):
    def begin(self) -> Any:
        return collections.deque([1.0, 2.0], maxlen=2)

    def gain(self, x: Tensor) -> Any:
        self.kept.appendleft(len(self.kept) + 1.0)
        return sum(self.kept)

    def seen(self) -> Any:
        return [*self.kept]


class Recent(Remembering):
    """The most common cache of few entries."""

    def begin(self) -> Any:
        return collections.OrderedDict()

    def change(self, call: int, late: bool) -> None:
        self.key = "abacb"[call]

    def gain(self, x: Tensor) -> Any:
        if self.key in self.kept:
            self.kept.move_to_end(self.key)
        else:
            self.kept[self.key] = x.sum()
        while len(self.kept) > 2:
            self.kept.popitem(last=False)
        return 1

    def seen(self) -> Any:
        return [*self.kept]


class Pops(Remembering):
    """The last of what is there in another order each time."""

    def change(self, call: int, late: bool) -> None:
        self.kept.clear()
        self.kept.update((k, ord(k) - 96) for k in ("abc", "bca", "cab", "acb", "cba")[call])

    def gain(self, x: Tensor) -> Any:
        return self.kept.popitem()[1]

    def seen(self) -> Any:
        return [*self.kept]


class PopsOrdered(Pops):
    def begin(self) -> Any:
        return collections.OrderedDict()


class Late(Remembering):
    """A key that is there in some calls."""

    def change(self, call: int, late: bool) -> None:
        if late:
            self.kept[KEY] = self.value()
        elif KEY in self.kept:
            del self.kept[KEY]

    def value(self) -> Any:
        return 5.0

    def gain(self, x: Tensor) -> Any:
        try:
            self.kept[KEY]
        except KeyError:
            return 1.0
        return 5.0


class LateModule(Late):
    def begin(self) -> Any:
        return nn.ModuleDict()

    def value(self) -> Any:
        return nn.Identity()


class LateVariable(Late):
    """Of the environment."""

    def begin(self) -> Any:
        return os.environ

    def value(self) -> Any:
        return "5"

    def gain(self, x: Tensor) -> Any:
        return float(os.environ.get(KEY, "1"))


class Truth(Late):
    def begin(self) -> Any:
        return collections.OrderedDict()

    def gain(self, x: Tensor) -> Any:
        return 5.0 if self.kept else 1.0


class TruthOfDefaults(Truth):
    def begin(self) -> Any:
        return collections.defaultdict(list)


class Options:
    calls: int


class Counts(Remembering):
    """On an object of another class, which does not count yet."""

    def begin(self) -> Any:
        return Options()

    def gain(self, x: Tensor) -> Any:
        try:
            self.kept.calls += 1
        except AttributeError:
            self.kept.calls = 1
        return self.kept.calls

    def seen(self) -> Any:
        return self.kept.calls


class Own(Remembering):
    """Among its own attributes."""

    def change(self, call: int, late: bool) -> None:
        self.__dict__.pop("late", None)
        if late:
            self.late = True

    def gain(self, x: Tensor) -> Any:
        return 5.0 if "late" in self.__dict__ else 1.0


class OfClass(Remembering):
    """On a class, which has no gain until then."""

    def begin(self) -> Any:
        return type("Options", (), {})

    def change(self, call: int, late: bool) -> None:
        if late:
            self.kept.gain = 5.0

    def gain(self, x: Tensor) -> Any:
        try:
            return self.kept.gain
        except AttributeError:
            return 1.0


class Forwards(Remembering):
    """Names that it does not have are those of its options."""

    def begin(self) -> Any:
        return Options()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.kept, name)

    def gain(self, x: Tensor) -> Any:
        try:
            self.calls += 1
        except AttributeError:
            self.calls = 1
        return self.calls


class SetsDefaults(Remembering):
    def gain(self, x: Tensor) -> Any:
        self.__dict__.setdefault("calls", 0)
        self.calls += 1
        return self.calls


class Draws(Remembering):
    def begin(self) -> Any:
        return random.Random(3)

    def gain(self, x: Tensor) -> Any:
        return x * self.kept.random() + self.kept.randint(1, 9) + self.kept.uniform(0, 1)

    def seen(self) -> Any:
        return self.kept.getstate()


@functools.lru_cache
def features(n: int) -> Tensor:
    return torch.randn(n, n)


class Features(Remembering):
    """Random ones, drawn once."""

    def begin(self) -> Any:
        features.cache_clear()
        torch.manual_seed(0)

    def gain(self, x: Tensor) -> Any:
        return features(4).sum()


KINDS = [
    Window, Left, Recent, Pops, PopsOrdered, Late, LateModule, LateVariable, Truth, TruthOfDefaults,
    Own, Counts, OfClass, Forwards, SetsDefaults, Draws, Features,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("error::amp_graph.ConversionWarning")
def test_each_call_goes_by_what_the_ones_before_left(kind: type[Remembering]) -> None:
    results = []
    for is_converted in (False, True):
        model = kind()
        if is_converted:
            amp_graph.convert(model, policy="bfloat16")
        found = []
        for call in range(5):
            model.change(call, call in (2, 3))
            found.append(model(torch.ones(1, 4)).mean())
        results.append((torch.stack(found), model.seen()))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=0.02, atol=0.02)
    assert results[1][1] == results[0][1]
    os.environ.pop(KEY, None)
