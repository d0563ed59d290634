"""New tensors that are filled with a number in a tensor stay in the graph, with its type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import assert_same_gradients, distance, twins
from two_layers import BFLOAT16, POLICIES, Two, X

import amp_graph
from amp_graph import Policy
from amp_graph.convert import record_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Anchors(Two):
    """Layers in a loop, the last of which gives each place the stride of its level, as in YOLO."""

    def __init__(self) -> None:
        super().__init__()
        self.strides = torch.tensor([8.0, 16.0])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in (self.a, self.b):
            x = layer(x)
        return x, self.filled(x)

    def filled(self, x: Tensor) -> Tensor:
        columns = [x.new_full((len(x), 1), s, dtype=x.dtype) for s in self.strides]
        return torch.cat(columns, 1)


class Like(Anchors):
    def filled(self, x: Tensor) -> Tensor:
        return torch.full_like(x, self.strides[1]) * x


class Counts(Anchors):
    """Whole numbers, and whether there are any, fill whole numbers and booleans."""

    def filled(self, x: Tensor) -> Any:
        count = (self.strides > 8).sum()
        made = (
            torch.full((3,), count),
            torch.full((3,), count > 0),
            torch.full((3,), x.max() - x.max()),
        )
        return (*made, torch.full((3,), count, dtype=torch.float64), count.new_full((3,), 2.5))


class Computed(Anchors):
    """A number of the model's own, without its gradient."""

    def filled(self, x: Tensor) -> Tensor:
        return x.new_full((3,), x.detach().mean())


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("kind", [Anchors, Like, Computed])
def test_they_do_not_end_the_graph(kind: type[nn.Module], policy: Policy) -> None:
    plain, model = twins(kind(), policy)
    results = []
    for each in (plain, model):
        results.append(each(X))
        torch.stack([y.square().mean() for y in results[-1]]).sum().backward()
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype and distance(theirs, ours) <= BFLOAT16
    assert_same_gradients(model, plain, BFLOAT16)
    assert not record_of(model).breaks
    (plan,) = amp_graph.plans(model)
    assert any(part.low for part in plan.parts()) and not plan.fallback


def test_they_have_the_type_of_the_number() -> None:
    plain, model = twins(Counts().eval(), Policy("bfloat16"))
    with torch.no_grad():
        ours, theirs = model(X)[1], plain(X)[1]
    assert [y.dtype for y in ours] == [y.dtype for y in theirs]
    assert all(map(torch.equal, ours, theirs))
    assert not record_of(model).breaks


def test_one_that_requires_a_gradient_fills_nothing() -> None:
    class Trained(Anchors):
        def filled(self, x: Tensor) -> Tensor:
            return x.new_full((3,), x.mean())

    for model in twins(Trained(), Policy("bfloat16")):
        with pytest.raises(TypeError, match="must be Number, not Tensor"):
            model(X)
