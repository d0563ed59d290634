"""`assert` of what is no tensor, in a model. PYTEST_DONT_REWRITE: Dynamo is to see it as it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from training import twins
from two_layers import Two, X

import amp_graph
from amp_graph.convert import record_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Held:
    def __init__(self, *tensors: Tensor) -> None:
        assert tensors, "nothing to hold"
        self.tensors = tensors


class Asserts(Two):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.a, self.b])

    def forward(self, x: Tensor, others: list[Tensor], named: dict[str, Tensor]) -> Tensor:
        assert others, "no others"
        assert named
        assert self.layers and self.a
        held = Held(x, *others)
        assert held
        h = self.a(sum(held.tensors))
        found = {"h": h}
        assert found, "nothing found"
        return self.b(found["h"]) + sum(named.values())


def test_it_ends_no_graph() -> None:
    plain, model = twins(Asserts(), "bfloat16")
    for others, named in (([X], {"y": X}), ([X, X], {"y": X}), ([X], {"y": X, "z": X})):
        expected = plain(X, others, named)
        torch.testing.assert_close(model(X, others, named), expected, rtol=0.03, atol=0.03)
    assert not record_of(model).breaks
    assert not any(plan.fallback for plan in amp_graph.plans(model))


@pytest.mark.parametrize("given", [([], {"y": X}), ([X], {})], ids=["list", "dictionary"])
def test_it_raises_as_the_model_does(given: tuple[list[Tensor], dict[str, Tensor]]) -> None:
    plain, model = twins(Asserts(), "bfloat16")
    with pytest.raises(AssertionError) as expected:
        plain(X, *given)
    for _ in range(2):
        model(X, [X], {"y": X})
        with pytest.raises(AssertionError) as raised:
            model(X, *given)
        assert str(raised.value) == str(expected.value)
