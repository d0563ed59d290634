"""Levels: how far tensors are narrowed, and what it costs in digits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from counting import CastCounter
from graphs import W, X, capture, capture_module, rewritten
from small_models import Attention
from torch import Tensor, nn
from torch.nn import functional as F

import amp_graph
from amp_graph import Policy, PolicyError
from amp_graph.ir import Color
from amp_graph.levels import Level
from amp_graph.passes.place_casts import traffic

LEVELS = ("safe", "balanced", "max")


def low_nodes(function: Callable[..., Tensor], level: str, dtype: str, *args: Tensor) -> set[str]:
    return set(rewritten(capture(function, *args), Policy(dtype, level=level)).plan.low)


def narrowed(function: Callable[..., Tensor], *args: Tensor, dtype: str = "bfloat16") -> list[bool]:
    """Whether the one denied operator of a function has low tensors, at each level."""
    return ["deny1" in low_nodes(function, level, dtype, *args) for level in LEVELS]


def test_softmax_and_norms_keep_low_tensors_from_balanced_on():
    assert narrowed(lambda x, w: torch.softmax(x @ w, -1) @ w, X, W) == [False, True, True]
    assert narrowed(lambda x, w: F.rms_norm(x @ w, (8,)) @ w, X, W) == [False, True, True]
    assert narrowed(lambda x, w: F.group_norm(x @ w, 2) @ w, X, W) == [False, True, True]
    assert narrowed(lambda x, w: (x @ w).var(0) @ w, X, W) == [False, False, True]
    assert narrowed(lambda x, w: (x @ w).exp() @ w, X, W) == [False, False, False]


def test_a_softmax_asked_for_in_float32_does_so_for_products_alone():
    """As in transformers' attention, and not where probabilities are mixed by hand, as experts."""
    asked = partial(torch.softmax, dim=-1, dtype=torch.float32)
    assert narrowed(lambda x, w: asked(x @ w) @ w, X, W) == [False, True, True]
    assert narrowed(lambda x, w: F.dropout(asked(x @ w)) @ w, X, W) == [False, True, True]
    mixed = narrowed(lambda x, w: (asked(x @ w) * (w @ x)).sum(-1), X, W)
    assert mixed == [False, False, True]
    assert narrowed(lambda x, w: ((x @ w).softmax(-1) * (w @ x)).sum(-1), X, W)[1]


def test_upsampling_does_so_where_its_kernel_adds_up_gradients_in_float32():
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.interpolate((x @ w)[None, None], scale_factor=2, mode="bilinear") @ w.repeat(2, 1)

    assert narrowed(function, X, W) == [False, True, True]
    assert narrowed(function, X.to("meta"), W.to("meta")) == [False, False, False]


def test_powers_do_so_where_the_low_precision_has_their_range():
    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).pow(3) @ w

    assert narrowed(function, X, W) == [False, True, True]
    assert narrowed(function, X, W, dtype="float16") == [False, False, False]


def test_layer_norm_does_so_where_its_kernel_adds_up_in_float32():
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(x @ w, (8,)) @ w

    assert narrowed(function, X, W) == [False, False, True]
    assert narrowed(function, X.to("meta"), W.to("meta")) == [False, True, True]


GIVEN = {
    "times": lambda x, w: ((x - 1.6e9) / 86400) @ w,
    "columns": lambda x, w: F.embedding(x[:, 0].long() // 128 % 8, w) * (x[:, 1:] @ w[1:]),
    "norm": lambda x, w: F.batch_norm(x, None, None, w[0], training=True) @ w,
    "differences": lambda x, w: torch.relu(x - x.roll(1, 0)) @ w,
}


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("level", LEVELS)
def test_what_a_graph_is_given_is_not_rounded_before_its_first_product(name, level):
    """Times of 1.6e9 are one number in bfloat16."""
    x = 1.6e9 + torch.arange(64.0).view(8, 8).pow(3)
    result = rewritten(capture(GIVEN[name], x, W, weights=1), Policy("bfloat16", level=level))
    expected = GIVEN[name](x, W)
    error = (result.module(x, W) - expected).norm() / expected.norm()
    assert error < 0.02


def test_what_is_returned_is_not_rounded_to_save_bytes():
    assert narrowed(lambda x, w: torch.softmax(x @ w, -1), X, W) == [False, False, True]


class Stream(nn.Module):
    """A residual stream that begins with a parameter, as with an embedding, between norms."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Parameter(torch.ones(8))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.begin
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x


class BehindSums(Stream):
    """Norms behind the sums instead, so that what they return is the stream."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.begin
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = norm(x + layer(x))
        return x


class Joined(Stream):
    """A stream that begins with a norm of what is joined, of float32 and low values."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x * self.begin, self.layers[0](x)])
        x = self.norms[0](torch.dropout(x, 0.1, True))
        return self.norms[1](x + self.layers[1](x))


class BehindProducts(BehindSums):
    """As in ALBERT, whose embeddings go through a product before they are the stream."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.layers[0](x))


class BeginsInNorm(Stream):
    """As with patches, which a convolution makes and a norm makes the stream of."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.layers[0](x))
        return self.layers[2](x + self.layers[1](self.norms[1](x)))


class InFrontOfAHead(BehindSums):
    """What the last norm returns goes into a product alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](super().forward(x))


class OnBranches(Stream):
    """What is added comes of a norm, and the last sum goes into one."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.begin
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + norm(layer(x))
        return self.norms[0](x)


@pytest.mark.parametrize(
    ("make", "device", "dtype", "level", "low"),
    [
        (Stream, "meta", "bfloat16", "safe", 0),
        (Stream, "meta", "bfloat16", "balanced", 3),
        (Stream, "meta", "float16", "balanced", 0),  # a stream may outgrow 65504
        (Stream, "meta", "float16", "max", 3),
        (Stream, "cpu", "bfloat16", "balanced", 0),  # each layer norm would cast the stream
        (Stream, "cpu", "bfloat16", "max", 3),
        (BehindSums, "meta", "bfloat16", "balanced", 0),  # one rounding more in each layer
        (BehindSums, "meta", "bfloat16", "max", 3),
        (InFrontOfAHead, "meta", "bfloat16", "balanced", 1),
        (Joined, "meta", "bfloat16", "balanced", 0),
        (OnBranches, "meta", "bfloat16", "balanced", 3),
        (OnBranches, "meta", "float16", "balanced", 0),
    ],
)
def test_residual_streams_are_narrowed_where_their_range_allows(make, device, dtype, level, low):
    captured = capture_module(make().to(device), torch.ones(4, 8, device=device))
    plan = rewritten(captured, Policy(dtype, level=level)).plan
    sums = [n for n, f in plan.facts.items() if f.op == "aten.add.Tensor"]
    assert len(plan.low.intersection(sums)) == low


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("make", "level", "low"),
    [
        (BehindSums, "balanced", 0),
        (BehindProducts, "balanced", 0),
        (BehindProducts, "max", 3),
        (BeginsInNorm, "balanced", 0),
        (BeginsInNorm, "max", 2),
        (OnBranches, "balanced", 3),
    ],
)
def test_norms_that_make_a_stream_stay_in_float32(make, level, low, dtype):
    captured = capture_module(make().to("meta"), torch.ones(4, 8, device="meta"))
    plan = rewritten(captured, Policy(dtype, level=level)).plan
    norms = [n for n, f in plan.facts.items() if f.op == "aten.layer_norm.default"]
    assert len(plan.low.intersection(norms)) == low


def test_a_reduction_reads_low_tensors_and_returns_float32():
    result = rewritten(capture(lambda x, w: (x @ w).sum(0), X, W), Policy("bfloat16", level="safe"))
    assert result.casts() == ["x -> bfloat16", "w -> bfloat16"]
    product = X.bfloat16() @ W.bfloat16()
    assert torch.equal(result(X, W), product.float().sum(0))
    assert result.color("deny1") is Color.DENY


def test_a_wide_value_is_not_rounded_for_a_reduction():
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x.relu()
        return (y @ w) * y.sum()

    result = rewritten(capture(function, X, W), Policy("bfloat16", level="safe"))
    assert not result.is_low("clear1")


@pytest.mark.parametrize("make", [Stream, Attention])
def test_each_level_moves_no_more_bytes_than_the_one_before(make):
    def moved(level: str) -> int:
        captured = capture_module(make().to("meta"), torch.ones(4, 8, device="meta"))
        plan = rewritten(captured, Policy("bfloat16", level=level)).plan
        high = (f for n, f in plan.facts.items() if n not in plan.low)
        return plan.cast_bytes + sum(traffic(f, [plan.facts[r] for r in f.reads]) for f in high)

    figures = [moved(level) for level in LEVELS]
    assert all(a >= b for a, b in itertools.pairwise(figures)), figures
    assert figures[0] > figures[-1]


@pytest.mark.parametrize("level", LEVELS)
def test_a_converted_model_trains_at_every_level(level, fresh_dynamo):
    torch.manual_seed(0)
    model = amp_graph.convert(Stream(), policy=Policy("bfloat16", level=level))
    x, plain = torch.randn(16, 8), Stream()
    plain.load_state_dict(model.state_dict())
    counter = CastCounter()
    with counter:
        model(x).square().mean().backward()
    plain(x).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad.dtype is torch.float32
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.05, atol=0.01)
    assert counter.forward.casts


def test_a_level_that_does_not_exist_is_refused():
    with pytest.raises(
        PolicyError, match="unknown level 'fast': choose one of safe, balanced, max"
    ):
        Policy(level="fast")
    assert Policy(level=Level.MAX) == Policy(level="max")
    assert Policy().level is Level.BALANCED
