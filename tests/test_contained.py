"""Whether a list or tuple holds a tensor, in a model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from training import twins
from two_layers import Two, X

from amp_graph.convert import record_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Asks(Two):
    def forward(self, x: Tensor) -> tuple[Tensor, list[bool]]:
        h = self.a(x)
        y = h.add_(1)
        found = [h in (None, h), y in [h], h not in ("no", h, x), h in (None, "h"), x in [x, h]]
        weight = self.b.weight in [*self.b.parameters()]
        return self.b(h) * 2 if h in [h] else h, [*found, weight, bool(h.sum() in (h.sum(), 0))]


def test_a_tensor_is_looked_for_by_itself_first() -> None:
    plain, model = twins(Asks(), "bfloat16")
    expected, found = plain(X), model(X)
    assert found[1] == expected[1] == [True, True, False, False, True, True, True]
    torch.testing.assert_close(found[0], expected[0], rtol=0.03, atol=0.03)


class Holds(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h) if h in (None, h) else h


def test_it_ends_no_graph() -> None:
    _, model = twins(Holds(), "bfloat16")
    model(X)
    assert not record_of(model).breaks
