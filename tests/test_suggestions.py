"""The suggestions of `explain`: following one changes what it says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from nets import Net
from torch import nn
from torch.nn import functional as F

import amp_graph
from amp_graph import Override, Policy

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Spread(nn.Module):
    """The one that is denied and what computes on it: of that the model's own products are low."""

    def __init__(self, scores: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.first, self.second, self.scores = nn.Linear(8, 8), nn.Linear(8, 8), scores

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.gelu(self.scores(self.first(x))))


BOTH = (3 + 2) * 2 * 32  # bytes less that `mul` and `gelu` read and write
NUMBER = torch.tensor(0.5)


@pytest.mark.parametrize(
    ("scores", "freed_bytes"),
    [
        (lambda h: h.exp() * h, BOTH),
        (lambda h: torch.addcmul(h.exp(), h, NUMBER), BOTH + 2),  # a number promotes nothing
        (lambda h: h.exp() * 2, 0),  # which reads float32 alone
        (lambda h: (h.exp() * 2 + 1) * h, 0),  # what stays in float32 promotes the last product
    ],
    ids=["mixes", "mixes with a number", "alone", "behind what stays"],
)
def test_the_suggestions_free_what_they_say(
    scores: Callable[[torch.Tensor], torch.Tensor], freed_bytes: int
) -> None:
    """Following one makes its operators low, and as many as it says."""
    x = torch.randn(4, 8)
    model = amp_graph.convert(Spread(scores), policy="bfloat16")
    model(x)
    found = [s for s in amp_graph.explain(model).data.suggestions if "aten.exp" in s.what]
    assert [(s.nodes, s.bytes) for s in found] == ([(2, freed_bytes)] if freed_bytes else [])
    lists = {"deny": {"mine": {"why": "small", "bounded": True, "ops": ["aten.exp"]}}}
    torch._dynamo.reset()
    freed = amp_graph.convert(Spread(scores), policy=Policy(dtype="bfloat16", lists=lists))
    freed(x)
    gained = amp_graph.plans(freed)[0].low - amp_graph.plans(model)[0].low
    assert len(gained) == sum(s.nodes for s in found)
    assert not any("aten.exp" in s.what for s in amp_graph.explain(freed).data.suggestions)


@pytest.mark.parametrize(("number", "advice"), [(1e-8, "an epsilon of 1e-4"), (1e9, "-1e4 or")])
def test_a_constant_out_of_range_is_told_how_to_be_within(number: float, advice: str) -> None:
    class Offset(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            return x / (x.abs() + number)

    model = amp_graph.convert(Offset(), policy=Policy(dtype="float16", loss_scale=None))
    model(torch.randn(4, 8))
    (found,) = (s for s in amp_graph.explain(model).data.suggestions if "the constant" in s.what)
    assert advice in found.how


class Promoting(nn.Module):
    """Sums with a float32 value, each promoted by it."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.layer = nn.Embedding(4, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = self.places(torch.arange(4))
        sums = [F.gelu(self.layer(x + n)) + place for n in range(3)]
        return self.layer(sums[0]) + self.layer(sums[1]) + self.layer(sums[2])


def test_a_suggestion_names_all_that_it_would_free() -> None:
    x, policy = torch.randn(4, 8), Policy("bfloat16")
    for _ in range(2):
        model = amp_graph.convert(Promoting(), policy=policy)
        model(x)
        found = amp_graph.explain(model).data
        promoted = [s for s in found.suggestions if s.what.startswith("embedding")]
        if promoted:
            assert promoted[0].nodes == 3
            before, how = found, promoted[0].how.partition("Policy(overrides=")[2][:-1]
            policy = Policy("bfloat16", overrides=eval(how, {"Override": Override}))
    low, was = (f.modules[0].figures.operators.low for f in (found, before))
    assert not promoted and low - was == 3


class Growing(nn.Module):
    """`relu` moves the fewest bytes, `gelu` the most. `second` has fewer than that, but FLOPs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.gelu(self.first(x.relu()))[:, :64])


RELU, GELU, SLICE = (Override("deny", op=f"aten.{name}") for name in ("relu", "gelu", "slice"))
SECOND = Override("deny", module="second")


@pytest.mark.parametrize(
    ("denied", "expected"),
    [
        ([RELU, GELU], ["op=aten.gelu", "op=aten.relu"]),
        ([GELU, SECOND], ["module=second", "op=aten.gelu"]),
        ([RELU, GELU, SECOND], ["module=second", "op=aten.gelu", "op=aten.relu"]),
        ([SLICE], []),  # a view, which moves nothing
    ],
    ids=["bytes", "FLOPs", "both", "neither"],
)
def test_the_most_rewarding_change_comes_first(denied: list[Override], expected: list[str]) -> None:
    model = amp_graph.convert(Growing(), policy=Policy("bfloat16", overrides=denied))
    model(torch.randn(64, 64))
    found = [s.what.rpartition(": ")[2] for s in amp_graph.explain(model).data.suggestions]
    assert found == expected
