"""Models that put results into what they are given, whose code runs under autocast."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_graph

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning"),
]

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


class Puts(nn.Module):
    """A pipeline, of which each part adds to the batch; `seen` has it captured anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(8, 4), list[int]()

    @torch._dynamo.disable
    def forward(self, batch: dict[str, Any], into: list[Any] | None = None) -> Any:
        y = self.layer(batch["x"])
        batch["y"], batch["nested"] = y, {"y": y, "own": batch}
        batch["parts"].append(y)
        if into is not None:
            into.append((y, 1))
            into[0] = y
        batch["own"].mul_(2)
        return batch, y, batch["own"]


def batch() -> dict[str, Any]:
    return {"x": X, "parts": [], "own": torch.ones(2, dtype=torch.bfloat16), "object": object()}


def test_the_caller_s_containers_hold_float32() -> None:
    torch.manual_seed(0)
    plain = Puts()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for call in range(3):
        given, into = batch(), [None]
        own, thing = given["own"], given["object"]
        result, y, same = model(given, into=into)
        expected = plain(batch())[1]
        assert result is given and same is given["own"] is own and own.dtype is torch.bfloat16
        assert given["object"] is thing and own.eq(2).all()
        assert y is given["y"] is given["parts"][0] is given["nested"]["y"] is into[0] is into[1][0]
        assert given["nested"]["own"] is given
        torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02)
        assert torch.equal(y, expected) == (call == 0)  # the first one tells what is not captured


def test_tensors_that_are_given_come_back_as_they_are() -> None:
    class Returns(Puts):
        @torch._dynamo.disable
        def forward(self, x: Tensor, *others: Any) -> Any:
            return self.layer(x), *others

    model = amp_graph.convert(Returns(), policy="bfloat16")
    low, listed = torch.ones(2, dtype=torch.bfloat16), [torch.ones(2, dtype=torch.float16)]
    for _ in range(3):
        y, *others = model(X, low, listed)
        assert y.dtype is torch.float32 and others[0] is low and others[1] is listed
        assert listed[0].dtype is torch.float16


class Node:
    def __init__(self, x: Tensor) -> None:
        self.x, self.h = x, x


def test_objects_in_lists_come_back_as_results_do() -> None:
    """With copies of them: what a model keeps in attributes is its own."""

    class Fills(Puts):
        @torch._dynamo.disable
        def forward(self, nodes: list[Node]) -> list[Node]:
            for node in nodes:
                node.h = self.layer(node.x)
            return nodes

    model = amp_graph.convert(Fills(), policy="bfloat16")
    for _ in range(3):
        assert [node.h.dtype for node in model([Node(X), Node(X)])] == [torch.float32] * 2
