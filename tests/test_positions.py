"""What says where something is, in pixels or as an index, is not rounded on its way there."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from graphs import W, X, run
from torch import Tensor, nn
from training import distance

import amp_graph
from amp_graph import Override, Policy
from amp_graph.passes.analysis import AnalyzedGraph

LEVELS = ("safe", "balanced", "max")


def neighbours(x: Tensor, w: Tensor) -> Tensor:
    """Between two rows each, at a place that was computed."""
    place = (x @ w)[:, 0].sigmoid() * 6.5
    row = place.floor()
    fraction = (place - row)[:, None]
    rows, first = w @ x, row.long()
    return (1 - fraction) * rows[first] + fraction * rows[first + 1]


@pytest.mark.parametrize("level", LEVELS)
def test_places_and_fractions_are_not_rounded_and_values_are(level: str) -> None:
    result = run(neighbours, X, W, policy=Policy("bfloat16", level=level))
    names = {f.op: f.name for f in result.plan.facts.values()}
    for op in ("aten.sigmoid.default", "aten.floor.default", "aten.sub.Tensor"):
        assert result.rule(names[op]) == "position for"
    assert result.is_low(names["aten.index.Tensor"])
    assert result.rule(names["aten.mul.Tensor"]) != "position for"  # a value times a fraction


WEIGHTS = {
    "float32 arithmetic": lambda fraction, x, w: fraction.exp(),
    "an input": lambda fraction, x, w: x[:, 0],
    "a weight": lambda fraction, x, w: w[0],
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_fractions_that_full_float32_weighs_are_not_rounded(name: str) -> None:
    """A weight counts as what its low-precision copy holds."""

    def weighed(x: Tensor, w: Tensor) -> Tensor:
        place = (x @ w)[:, 0].sigmoid() * 6.5
        row = place.floor()
        fraction = place - row
        weight = fraction * WEIGHTS[name](fraction, x, w)
        return weight[:, None] * (w @ x)[row.long()]

    result = run(weighed, X, W, weights=1)
    _, product, _ = (f.name for f in result.plan.facts.values() if f.op == "aten.mul.Tensor")
    assert (result.rule(product) == "position for") is (name != "a weight")


def test_what_becomes_no_integer_is_as_free_as_before() -> None:
    def seen(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        hidden = (x @ w).atan()
        return hidden @ w, hidden.bool().long()

    assert run(seen, X, W).is_low("infer1")


def test_what_is_normalised_before_does_not_count() -> None:
    """As in networks of small integers, which round what their norms return."""

    def quantized(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        hidden = (x @ w).atan()
        return hidden @ w, F.layer_norm(hidden, (8,)).mul(127).to(torch.int8)

    result = run(quantized, X, W, policy=Policy("bfloat16", level="max"))
    assert result.is_low("infer1")
    assert result.rule("infer2") == "position for"


def test_an_override_is_stronger() -> None:
    policy = Policy("bfloat16", overrides=[Override("allow", op="aten.floor")])
    result = run(neighbours, X, W, policy=policy)
    (floor,) = (f.name for f in result.plan.facts.values() if f.op == "aten.floor.default")
    assert result.rule(floor) == "override"


class Warp(nn.Module):
    """An image moved by an optical flow that is computed from two, as RAFT and its kind do."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.features, self.result = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.flow = nn.Conv2d(6, 2, 3, padding=1)
        self.warped = self.looked_up if by_hand else self.sampled

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        height, width = first.shape[-2:]
        rows, columns = torch.meshgrid(
            torch.arange(height).float(), torch.arange(width).float(), indexing="ij"
        )
        flow = self.flow(torch.cat([first, second], 1)) * 3
        x, y = (torch.stack([columns, rows]) + flow).unbind(1)
        return self.result(self.warped(self.features(second), x, y))

    @staticmethod
    def sampled(image: Tensor, x: Tensor, y: Tensor) -> Tensor:
        height, width = image.shape[-2:]
        grid = torch.stack([2 * x / (width - 1) - 1, 2 * y / (height - 1) - 1], -1)
        return F.grid_sample(image, grid, align_corners=True)

    @staticmethod
    def looked_up(image: Tensor, x: Tensor, y: Tensor) -> Tensor:
        height, width = image.shape[-2:]
        x, y = x.clamp(0, width - 1.001), y.clamp(0, height - 1.001)
        left, above = x.floor(), y.floor()
        right, below = (x - left)[:, None], (y - above)[:, None]

        def at(rows: Tensor, columns: Tensor) -> Tensor:
            place = (rows * width + columns).flatten(1)[:, None].expand(-1, 8, -1)
            return image.flatten(2).gather(2, place).view(*image.shape)

        column, row = left.long(), above.long()
        upper = (1 - right) * at(row, column) + right * at(row, column + 1)
        lower = (1 - right) * at(row + 1, column) + right * at(row + 1, column + 1)
        return (1 - below) * upper + below * lower


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("by_hand", [False, True], ids=["grid_sample", "by hand"])
def test_a_flow_field_is_as_exact_as_under_autocast(by_hand: bool, level: str) -> None:
    torch.manual_seed(0)
    plain = Warp(by_hand)
    first = torch.randn(2, 3, 48, 64)
    second = F.interpolate(torch.randn(2, 3, 12, 16), size=(48, 64))
    model = amp_graph.convert(copy.deepcopy(plain), policy=Policy("bfloat16", level=level))

    def learned(model: nn.Module, autocast: bool = False) -> tuple[Tensor, Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = model(first, second).float()
        result.square().mean().backward()
        return result, torch.cat([p.grad.flatten() for p in model.parameters()])

    exact, ours, autocast = learned(plain), learned(model), learned(plain, autocast=True)
    (plan,) = amp_graph.plans(model)
    assert plan.fallback is None
    for of_ours, of_autocast, reference in zip(ours, autocast, exact, strict=True):
        assert distance(of_ours, reference) <= 1.05 * distance(of_autocast, reference)


def places(height: int, width: int) -> Tensor:
    rows, columns = torch.arange(height).float(), torch.arange(width).float()
    return torch.stack(torch.meshgrid(columns, rows, indexing="xy"))[None]


class Refined(nn.Module):
    """Places that are moved step by step, as in RAFT: nobody looks at the last ones."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 8, 3, padding=1)
        self.moves = nn.Conv2d(18, 2, 3, padding=1)
        self.weights = nn.Conv2d(18, 2, 3, padding=1)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        begin = places(*first.shape[-2:])
        place = begin.expand(len(first), -1, -1, -1)
        first, second = self.features(first), self.features(second)
        for _ in range(2):
            x, y = place.unbind(1)
            grid = torch.stack([2 * x / (x.shape[2] - 1) - 1, 2 * y / (y.shape[1] - 1) - 1], -1)
            seen = F.grid_sample(second, grid, align_corners=True)
            features = torch.cat([first, seen, place - begin], 1)
            place = place + self.moves(features)
        return (place - begin) * self.weights(features)


class Deformed(nn.Module):
    """A field of features at places that were moved, as in a NeRF of what changes its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.bend, self.field = nn.Linear(3, 3), nn.Linear(24, 8)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        place = first.permute(0, 2, 3, 1)
        place = place + 0.1 * self.bend(second.permute(0, 2, 3, 1))
        angles = [place * 2**k * torch.pi for k in range(4)]
        return self.field(torch.cat([f(a) for a in angles for f in (torch.sin, torch.cos)], -1))


@pytest.mark.parametrize("kind", [Refined, Deformed])
@pytest.mark.parametrize("level", [*LEVELS, "narrow"])
def test_a_place_that_moved_on_is_one(
    level: str, kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Narrow streams are those of level "balanced" on GPUs."""
    if level == "narrow":
        monkeypatch.setattr(AnalyzedGraph, "narrows_streams", property(lambda graph: True))
    torch.manual_seed(0)
    plain = kind()
    policy = Policy("bfloat16", level=level if level in LEVELS else "balanced")
    model = amp_graph.convert(copy.deepcopy(plain), policy=policy)
    first, second = (F.interpolate(torch.randn(2, 3, 12, 16), size=(48, 64)) for _ in range(2))
    exact = plain(first, second)
    with torch.autocast("cpu", torch.bfloat16):
        autocast = plain(first, second).float()
    assert distance(model(first, second), exact) <= 1.05 * distance(autocast, exact)


class Columns(nn.Module):
    """Ids, lengths and a flag in columns of floats, which are also features."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.features = nn.Embedding(2000, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        ids, length, seen = x.unbind(1)
        positions = torch.arange(4)
        kept = positions < length.relu().to(torch.int32)[:, None] - 300
        return self.names(ids.long()) + self.features(x), ids.long(), kept, seen.bool()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("level", LEVELS)
def test_whole_numbers_and_flags_in_columns_of_floats(dtype: str, level: str) -> None:
    x = torch.tensor([[513.0, 301.0, 0.0], [1095.0, 303.0, 1e-9], [1999.0, 304.0, 1.0]])
    model = Columns()
    expected = model(x)[1:]
    found = amp_graph.convert(model, policy=Policy(dtype, level=level))(x)[1:]
    assert all(map(torch.equal, found, expected))
    (plan,) = amp_graph.plans(model)
    assert not plan.fallback and plan.converts
