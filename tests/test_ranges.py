"""Numbers that low precision does not hold: mask values, epsilons, what lies next to a bound."""

import pytest
import torch
import torch.nn.functional as F
from graphs import BFLOAT16, FLOAT16, SIZE, W, X, run
from torch import nn

import amp_graph
from amp_graph import Policy
from amp_graph.ir import Color


@pytest.mark.parametrize("policy", [BFLOAT16, FLOAT16], ids=["bfloat16", "float16"])
def test_a_mask_value_out_of_range_saturates(policy):
    """Written by masked_fill, added as a mask, or read by an attention kernel."""
    mask = torch.where(torch.rand(SIZE, SIZE) < 0.5, -3.4e38, 0.0)
    mask.fill_diagonal_(0.0)

    def filled(x, w):
        scores = x @ w
        return scores.masked_fill(scores < 1.0, -3.4e38).softmax(-1) @ w

    def attended(x, w):
        mask = torch.full((SIZE, SIZE), -3.4e38).triu(1)
        heads = (1, 1, SIZE, SIZE)
        return F.scaled_dot_product_attention(x.view(heads), w.view(heads), w.view(heads), mask)

    def added(x, w, mask):
        return ((x @ w) + mask).softmax(-1) @ w

    tolerance = 8 * torch.finfo(policy.dtype).eps
    for function, args in ((filled, (X, W)), (attended, (X, W)), (added, (X, W, mask))):
        result = run(function, *args, policy=policy)(*args)
        assert torch.isfinite(result).all(), function.__name__
        torch.testing.assert_close(result, function(*args), rtol=tolerance, atol=tolerance)


def test_a_row_masked_out_stays_finite_in_float16():
    """-inf, where float32 had a finite number, would turn such a row into nan."""

    def function(x, w):
        scores = (x @ w).masked_fill(torch.ones(SIZE, SIZE, dtype=torch.bool), -1e9)
        return torch.relu(scores).softmax(-1) @ w, scores.relu() @ w

    result = run(function, X, W, policy=FLOAT16)
    assert [c.value for c in result.plan.casts if c.saturate]
    assert all(torch.isfinite(t).all() for t in result(X, W))


@pytest.mark.parametrize(
    "mask",
    [
        lambda s, seen: torch.where(seen, s, torch.full([], torch.finfo(s.dtype).min)),
        lambda s, seen: torch.where(seen, s, torch.tensor(-1e30)),
        lambda s, seen: s.masked_fill(~seen, torch.tensor(-1e9)),
        lambda s, seen: s + torch.where(seen, torch.zeros(()), torch.tensor([-1e9, 0.0])[0]),
    ],
    ids=["full", "where", "masked_fill", "added"],
)
def test_a_mask_value_in_a_tensor_saturates(mask):
    seen = torch.ones(SIZE, SIZE, dtype=torch.bool).tril()
    seen[2] = False

    def function(x, w, seen):
        return mask(x @ w, seen).softmax(-1) @ w

    result = run(function, X, W, seen, policy=FLOAT16)(X, W, seen)
    torch.testing.assert_close(result, function(X, W, seen), rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    "joined",
    [
        lambda s: F.pad(s, (1, 1), value=-1e9),
        lambda s: nn.utils.rnn.pad_sequence([s.t(), s.t()[:2]], padding_value=-1e9).flatten(1).t(),
        lambda s: s.masked_fill(s < 1.0, -torch.inf).nan_to_num(neginf=-1e9),
        lambda s: F.pad(s.relu(), (1, 1), value=1e-9).log(),
    ],
    ids=["pad", "pad_sequence", "nan_to_num", "small"],
)
def test_a_number_that_is_padded_with_is_not_lost_in_float16(joined):
    def function(x, w):
        return joined(x @ w).softmax(-1)

    result = run(function, X, W, policy=FLOAT16)
    assert "constant out of range" in {paint.rule for paint in result.plan.paints.values()}
    torch.testing.assert_close(result(X, W), function(X, W), rtol=0.01, atol=0.01)


def test_an_epsilon_inside_of_a_kernel_in_float32_may_vanish():
    def function(x, w):
        h = x @ w
        return F.rms_norm(h, (SIZE,), eps=1e-8) @ w

    result = run(function, X, W, policy=FLOAT16)
    assert "constant out of range" not in {paint.rule for paint in result.plan.paints.values()}


@pytest.mark.parametrize(
    "mask",
    [
        lambda s, seen, own, far, near: torch.where(own, near, torch.where(seen, s, far)),
        lambda s, seen, own, far, near: s.masked_fill(~seen, far).masked_fill(own, near),
        lambda s, seen, own, far, near: s.clone().masked_fill_(~seen, far).masked_fill_(own, near),
    ],
    ids=["where", "masked_fill", "in place"],
)
def test_mask_values_in_buffers_keep_their_distance_in_float16(mask):
    """A row of nothing but the two looks at what is less far (Reformer's first token at itself)."""
    seen = torch.ones(SIZE, SIZE, dtype=torch.bool).tril()
    own = torch.eye(SIZE, dtype=torch.bool)

    def function(x, w, *masks):
        return mask(x @ w, *masks).softmax(-1) @ w

    args = (X, W, seen, own, torch.tensor(-1e9), torch.tensor(-1e5))
    result = run(function, *args, policy=FLOAT16)
    torch.testing.assert_close(result(*args), function(*args), rtol=0.01, atol=0.01)
    assert "number not known" in {paint.rule for paint in result.plan.paints.values()}
    low = run(function, *args)  # bfloat16 has the range
    assert "number not known" not in {paint.rule for paint in low.plan.paints.values()}


def test_an_epsilon_that_vanishes_keeps_its_operator_in_float32():
    def function(x, w):
        h = x @ w
        return h.relu() / (h.relu() + 1e-8) @ w

    assert run(function, X, W).is_low("infer1")
    half = run(function, X, W, policy=FLOAT16)
    assert half.rule("infer1") == "constant out of range"
    assert not half.is_low("infer1")
    assert torch.equal(half(-X, W), torch.zeros(SIZE, SIZE))  # 0 / 0 without it


@pytest.mark.parametrize(
    "floored",
    [
        lambda h: torch.maximum(h, torch.tensor(1e-9)),
        lambda h: torch.where(h > 0, h, torch.full((SIZE,), 1e-9)[:, None]),
        lambda h: h + torch.tensor([1e-9, 2e-8] * (SIZE // 2)),
    ],
    ids=["maximum", "where", "add"],
)
def test_an_epsilon_in_a_tensor_that_vanishes_does_so_too(floored):
    def function(x, w):
        return floored((x @ w).relu()).log()

    expected = function(-X, W)
    for policy in (BFLOAT16, FLOAT16):
        result = run(function, -X, W, policy=policy)
        torch.testing.assert_close(result(-X, W), expected, rtol=0.01, atol=0.01)


FAR = torch.full((SIZE, SIZE), 1.5)  # times SIZE: sigmoid is 1 - 6e-6 there
PROBABILITY = {
    "log": lambda p: (1 - p).log(),
    "clamped": lambda p: p.clamp(1e-7, 1 - 1e-7).neg().log1p(),
    "loss": lambda p: F.binary_cross_entropy(p, torch.zeros_like(p), reduction="none"),
    "power": lambda p: (1 - p) ** 2,
    "of several": lambda p: (p * (1 - p)).log(),
    "on no list": lambda p: torch.ops.aten._test_warn_in_autograd(p) * 2,
    "returned": lambda p: p,
    "moved": lambda p: p.view(-1)[2:],
}


@pytest.mark.parametrize("level", ["safe", "balanced"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", PROBABILITY)
def test_what_saturates_is_not_rounded_to_its_bound_where_that_is_seen(name, dtype, level):
    """Autocast rounds it to 1. The exact product here is that of float32."""

    def function(x, w):
        return PROBABILITY[name](torch.sigmoid(x @ w))

    eye = torch.eye(SIZE) * SIZE
    result = run(function, FAR, eye, policy=Policy(dtype, level=level))
    assert result.is_low("allow1") and result.rule("infer1") == "saturates"
    assert result.casts() == [f"x -> {dtype}", f"w -> {dtype}", "allow1 -> float32"]
    assert torch.equal(result(FAR, eye), function(FAR, eye))


@pytest.mark.parametrize("level", ["safe", "balanced", "max"])
def test_a_focal_weight_of_a_probability_next_to_one(level):
    """As in torchvision's detectors. The weight itself is read by nothing in float32."""

    def function(x, w):
        return ((1 - torch.sigmoid(x @ w)) ** 2) @ w

    eye = torch.eye(SIZE) * SIZE
    result = run(function, FAR, eye, policy=Policy("bfloat16", level=level))
    assert (result.rule("infer1") == "saturates") is (level != "max")
    if level != "max":
        torch.testing.assert_close(result(FAR, eye), function(FAR, eye), rtol=0.02, atol=0.0)


def test_a_difference_of_two_that_saturate():
    """The likelihood of a pixel in PixelCNN++."""

    def function(x, w):
        h = x @ w
        return (torch.sigmoid(h + 0.5) - torch.sigmoid(h - 0.5)).clamp(min=1e-7).log()

    eye = torch.eye(SIZE) * SIZE
    result = run(function, FAR, eye)
    torch.testing.assert_close(result(FAR, eye), function(FAR, eye), rtol=0.05, atol=0.05)


def test_a_gate_is_low():
    def function(x, w):
        gate = torch.sigmoid(x @ w)
        gated = (gate * (x @ w)).tanh() * gate
        return gated @ w + x, (gate @ w).tanh() @ w

    result = run(function, X, W)
    assert all(result.is_low(f"infer{i}") for i in (1, 2, 3, 4))


@pytest.mark.parametrize("level", ["safe", "balanced", "max"])
def test_the_logarithm_of_a_probability_that_a_product_reads_as_well(level):
    def function(x, w):
        p = (x @ w).softmax(-1)
        return p @ w, -(p * p.log()).sum(-1)

    x = torch.eye(SIZE) * 30
    result = run(function, x, W + torch.eye(SIZE), policy=Policy("float16", level=level))
    assert result.color("deny1") is Color.DENY and result.is_low("allow2")
    expected = function(x, W + torch.eye(SIZE))
    torch.testing.assert_close(result(x, W + torch.eye(SIZE)), expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_classifier_that_is_sure_and_wrong_still_learns(dtype):
    """Under autocast the loss is 100, and the gradient 0 or nan."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid())
    nn.init.constant_(model[2].bias, 12.0)
    x, target = torch.randn(4, 8), torch.zeros(4, 1)

    def learned():
        loss = F.binary_cross_entropy(model(x), target)
        return loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))

    expected = learned()
    amp_graph.convert(model, policy=dtype)
    torch.testing.assert_close(learned(), expected, rtol=0.05, atol=0.01)


TIMES = 1e4 + 1000 * torch.rand(256, 1, generator=torch.Generator().manual_seed(0))
FREQUENCIES = 10 ** -torch.linspace(0, 4, SIZE)[None]
ANGLES = {
    "linear": lambda t, f: F.linear(t, f.T).cos(),  # as temporal graph networks encode times
    "matmul": lambda t, f: (2 * torch.pi * (t @ f))[None].sin(),
    "bmm": lambda t, f: torch.bmm(f.T[None], t.T[None]).transpose(1, 2).cos(),
    "polar": lambda t, f: torch.view_as_real(torch.polar(torch.ones(256, SIZE), t @ f)),
}


@pytest.mark.parametrize("level", ["safe", "balanced", "max"])
@pytest.mark.parametrize("name", ANGLES)
def test_times_and_places_are_not_rounded_for_their_phase(name, level):
    angle = ANGLES[name]
    result = run(angle, TIMES, FREQUENCIES, policy=Policy("bfloat16", level=level))
    exact = angle(TIMES, FREQUENCIES)
    torch.testing.assert_close(result(TIMES, FREQUENCIES), exact, rtol=0, atol=0.02)
    assert result.rule("allow1") == "angle of"


def test_a_product_of_many_terms_is_low_whoever_reads_it():
    assert run(lambda x, w: (x @ w).sin(), X, W).is_low("allow1")


def turned(angle, places):
    """Places after two rotations by an angle that a network gave, and a shift."""
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    rows = [cos, -sin, zero + 100, sin, cos, zero, zero, zero, zero + 1]
    pose = torch.stack(rows, -1).view(-1, 3, 3)
    return places @ (pose @ pose).transpose(1, 2)


@pytest.mark.parametrize("level", ["safe", "balanced", "max"])
def test_poses_and_places_are_not_rounded(level):
    generator = torch.Generator().manual_seed(0)
    angle, places = torch.rand(5, generator=generator), torch.rand(5, 32, 3, generator=generator)
    result = run(turned, angle, places, policy=Policy("bfloat16", level=level))
    torch.testing.assert_close(result(angle, places), turned(angle, places))
    assert not (result.is_low("allow1") or result.is_low("allow2"))


def test_products_of_low_places_and_with_weights_are_low():
    def network(x, w, weight):
        hidden = (x @ w).view(-1, 2, 4)
        return (hidden @ hidden[:, :2, :2].repeat(1, 2, 2)) @ weight

    result = run(network, X, W, torch.rand(4, 4), weights=1)
    assert [result.is_low(name) for name in ("allow1", "allow2", "allow3")] == [True] * 3
