"""Whether a list or tuple holds a tensor, in a model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from training import twins
from two_layers import Two, X

import amp_graph
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


class Sizes(Two):
    """Asks for one number among others, of which some vary."""

    def forward(self, x: Tensor, numbers: list[int]) -> tuple[Tensor, list[bool]]:
        found = [5 in x.shape, 5.0 in numbers, "b" in (len(x), "a"), 4 not in (len(x), None)]
        found += [True in (len(x), 0), (5, x.shape[1]) in (x.shape, (1, 2)), [5] in [[len(x)]]]
        return self.b(self.a(x)) * (3 if 5 in numbers else 1), found


def test_a_number_is_looked_for_among_those_that_vary() -> None:
    plain, model = twins(Sizes(), "bfloat16")
    for size in (2, 3, 5, 4, 5, 1, 6, 7, 8):
        x = torch.ones(size, X.shape[1])
        expected, found = plain(x, [9, size]), model(x, [9, size])
        assert found[1] == expected[1]
        torch.testing.assert_close(found[0], expected[0], rtol=0.05, atol=0.05)
    assert len(amp_graph.plans(model)) <= 5 and not record_of(model).breaks
