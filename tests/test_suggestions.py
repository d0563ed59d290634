"""The suggestions of `explain`: following one changes what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from nets import Net
from torch import nn
from torch.nn import functional as F

import amp_graph
from amp_graph import ConversionWarning, Override, Policy
from amp_graph.inspection.report import ReportData
from amp_graph.inspection.suggestions import _bounded
from amp_graph.ir import Color
from amp_graph.oplists import known_names, load_lists

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
    """`relu` moves the fewest bytes, `gelu` the most. `second` saves less than its casts move,
    but has FLOPs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 1024), nn.Linear(512, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.gelu(self.first(x.relu()))[:, :512])


RELU, GELU, SLICE = (Override("deny", op=f"aten.{name}") for name in ("relu", "gelu", "slice"))
SECOND = Override("deny", module="second")


@pytest.mark.parametrize(
    ("denied", "expected"),
    [
        ([RELU, GELU], ["op=aten.gelu", "op=aten.relu"]),
        ([RELU, SECOND], ["module=second", "op=aten.relu"]),
        ([RELU, GELU, SECOND], ["op=aten.gelu", "module=second", "op=aten.relu"]),
        ([SLICE], []),  # a view, which moves nothing
    ],
    ids=["bytes", "FLOPs", "both", "neither"],
)
def test_the_most_rewarding_change_comes_first(denied: list[Override], expected: list[str]) -> None:
    model = amp_graph.convert(Growing(), policy=Policy("bfloat16", overrides=denied))
    model(torch.randn(512, 64))
    found = [s.what.rpartition(": ")[2] for s in amp_graph.explain(model).data.suggestions]
    assert found == expected


class Norm(nn.Module):
    """One written out, whose `rsqrt` is denied."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), Norm()
        self.layer_norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h = h + self.second(F.silu(self.norm(h)) * h)
        h = self.layer_norm(h) + torch.log1p(h.abs()) * self.first(h)
        return self.second(F.gelu(h) * h.cumsum(1)), h.exp() + h  # type: ignore[return-value]


class Squares(nn.Module):
    """`var` is denied, and may be stored in low precision at level max, which its entry says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.second(F.gelu(h - h.var(1, keepdim=True)) * h)


def denied(op: str) -> Policy:
    return Policy("bfloat16", overrides=(Override("deny", op=op),))


PLAIN = Policy("bfloat16")
WITHOUT_GELU = Policy("bfloat16", removed=(("infer", "aten.gelu"),))


@pytest.mark.parametrize(
    ("make", "policy", "expected"),
    [
        (Block, PLAIN, []),  # what is bounded then is no cheaper in low precision
        (Block, denied("layer_norm"), []),  # which is float32 without that
        (Block, denied("gelu"), []),  # whose operand is, too
        (Block, Policy("bfloat16", keep_float32=("second",)), ["an"]),
        (Block, WITHOUT_GELU, []),
        (Squares, PLAIN, ["var"]),
        (Promoting, PLAIN, ["embedding"]),
        (lambda: Spread(lambda h: h.exp() * h), PLAIN, ["exp"]),
        (lambda: Spread(torch.relu), denied("relu"), ["an"]),
        (lambda: Spread(torch.relu), WITHOUT_GELU, ["aten.gelu"]),
    ],
)
def test_a_change_does_what_is_said_of_it(
    make: Callable[[], nn.Module], policy: Policy, expected: list[str]
) -> None:
    """With what is printed put into the policy as it is, or the override taken out of it."""
    x = torch.randn(4, 8)
    before = explained(make(), policy, x)
    assert [s.what.partition(" ")[0] for s in before.suggestions] == expected
    for suggestion in before.suggestions:
        after = explained(make(), changed(policy, suggestion.how), x)
        assert suggestion.nodes == operators_low(after) - operators_low(before) > 0
        assert suggestion.cast_bytes == moved(after) - moved(before)


class Cautious(nn.Module):
    """Code that keeps its operators in float32: a conversion, a constant that vanishes."""

    def __init__(self, converts: bool, number: float):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.converts, self.number = converts, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h = F.gelu(h.float() if self.converts else h) * 2
        return self.second(F.gelu(h + self.number))


@pytest.mark.parametrize(("converts", "number"), [(True, 1.0), (False, 1e-8)])
def test_other_code_frees_what_is_said_of_it(converts: bool, number: float) -> None:
    x, policy = torch.randn(4, 8), Policy("float16", loss_scale=None)
    before = explained(Cautious(converts, number), policy, x)
    after = explained(Cautious(False, 1.0), policy, x)
    (found,) = before.suggestions
    assert found.nodes == operators_low(after) - operators_low(before) > 0
    assert found.cast_bytes == moved(after) - moved(before)


def test_an_entry_is_printed_with_all_that_it_says() -> None:
    """As bounded, it says what it did before of every operator on the deny list."""
    lists, known = load_lists(), known_names()
    for name, listing in lists.entries.items():
        if listing.color is Color.DENY and name in known:
            printed = lists.merged({"deny": {"mine": _bounded(lists, name)}}).entries[name]
            own = {k: getattr(listing, k) for k in ("group", "why", "file", "said")}
            assert replace(printed, **own) == replace(listing, bounded=True), name


def test_a_model_that_follows_a_plan_is_not_told_of_lists() -> None:
    """They change nothing of what is in the plan."""
    x = torch.randn(4, 8)
    model = amp_graph.convert(Squares(), policy=PLAIN)
    model(x)
    assert amp_graph.explain(model).data.suggestions
    torch._dynamo.reset()
    again = amp_graph.convert(Squares(), plan=amp_graph.plans(model))
    again(x)
    assert not amp_graph.explain(again).data.suggestions


def test_a_graph_that_runs_as_captured_would_have_as_many_operators_low_as_it_had() -> None:
    model = amp_graph.convert(Squares(), policy=PLAIN)
    model(torch.randn(4, 8))
    before = amp_graph.explain(model).data
    with pytest.warns(ConversionWarning):
        model.__dict__["_call_impl"].compiler.record.fall_back(0, "planted")
    (found,) = amp_graph.explain(model).data.suggestions
    assert (found.nodes, found.cast_bytes) == (operators_low(before), moved(before))


def test_large_graphs_have_fewer_changes_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each paints all nodes anew."""
    monkeypatch.setattr("amp_graph.inspection.suggestions.NODES", 1)
    policy = Policy("bfloat16", overrides=(RELU, GELU))
    (found,) = explained(Growing(), policy, torch.randn(8, 64)).suggestions
    assert found.what.endswith("op=aten.gelu")


def explained(model: nn.Module, policy: Policy, x: torch.Tensor) -> ReportData:
    torch._dynamo.reset()
    amp_graph.convert(model, policy=policy)(x)
    return amp_graph.explain(model).data


def changed(policy: Policy, how: str) -> Policy:
    _, _, printed = how.partition("Policy(")
    if not printed:
        return replace(policy, overrides=(), keep_float32=())
    given = eval(f"dict({printed}", {"Override": Override})
    return replace(policy, **given)


def operators_low(report: ReportData) -> int:
    return report.modules[0].figures.operators.low


def moved(report: ReportData) -> int:
    return sum(cast.bytes for cast in report.casts)
