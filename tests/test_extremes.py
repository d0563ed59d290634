"""`max` and `min` with a default in a model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from training import twins
from two_layers import Two, X

from amp_graph.convert import record_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Deepest(Two):
    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str] = []

    def scores(self, h: Tensor) -> Iterator[Tensor]:
        for path in self.paths:
            yield h.sum() * len(path)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * max(map(len, self.paths), default=3)
        h = h - min((len(path) for path in self.paths), default=0.5)
        return self.b(h) + max(self.scores(h), default=torch.ones(()))


def test_the_default_is_the_answer_without_items(caplog: pytest.LogCaptureFixture) -> None:
    plain, model = twins(Deepest(), "bfloat16")
    for paths in ([], ["ab"], ["a", "abc"], []):
        plain.paths, model.paths = paths, paths
        torch.testing.assert_close(model(X), plain(X), rtol=0.05, atol=0.2)
    assert not record_of(model).breaks and not caplog.records
