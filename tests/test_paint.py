"""Which nodes run low, and why. The cases of TensorFlow's grappler pass, and PyTorch's own.

The texts in `golden/paint` show every decision for a small graph; `EXPECTTEST_ACCEPT=1` renews
them.
"""

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from graphs import (
    BFLOAT16,
    FLOAT16,
    SIZE,
    W,
    X,
    capture,
    capture_module,
    chain,
    compact,
    rewritten,
    run,
    spelled,
)
from torch import nn

from amp_graph.ir import Color
from amp_graph.policy import Policy

GOLDEN = Path(__file__).parent / "golden" / "paint"


def assert_golden(case: str, text: str):
    path = GOLDEN / f"{case}.txt"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path} shows something else; EXPECTTEST_ACCEPT=1 renews it"


# Beside each chain, how TensorFlow's pass spells it where it differs. There a free node is low
# only between two allow operators, so that what trails behind the last one stays float32; here
# it goes where fewer bytes move, and half the bytes of a trailing node are moved in half.
@pytest.mark.parametrize(
    "spelling",
    [
        "W|C|C",
        "C|C|W",
        "W|G|W",
        "W|Gbg|W",  # W|gbg|W
        "b|gWC|C",  # b|gWC|c: its loop makes the carried value float32
        "b|CWCG|C",
        "c|gWCG|C",  # C|GWCG|C: what comes in as float32 is promoted, as in PyTorch
        "c|cgbgWC|G",  # C|CgbgWC|g
        "bcgCWCGCu",  # bcgCWCgcu
        "bcgcbCWCGC",
        "bgcgCWG",  # bgcgCWg
        "WGCGCGW",
        "WNGW",
    ],
)
def test_chains(spelling):
    if "N" in spelling:  # softmax is denied whatever surrounds it
        spelling = spelling.replace("N", "n").replace("nG", "ng")
    assert spelled(rewritten(chain(spelling))) == spelling.replace("|", "")


def test_the_long_chain_takes_two_casts_of_activations():
    result = rewritten(chain("bcgcwcgcu"))
    assert result.casts() == ["infer1 -> bfloat16", "weight -> bfloat16", "clear4 -> float32"]


def test_an_infer_operator_moved_to_deny_takes_two_casts_more():
    strict = Policy("bfloat16", lists={"deny": ["aten.atan"]})
    before, after = rewritten(chain("wgw")), rewritten(chain("wgw"), strict)
    assert (spelled(before), spelled(after)) == ("WGW", "WgW")
    assert len(after.casts()) == len(before.casts()) + 2


def test_clear_operators_are_coloured_from_both_sides():
    result = rewritten(chain("ccwccbcw"))
    assert spelled(result) == "CCWCCbCW"
    assert len([c for c in result.casts() if not c.startswith("weight")]) == 4


@pytest.mark.parametrize("spelling", ["c", "gcg", "cbgc", "n"])
def test_a_graph_without_allow_operators_stays_identical(spelling):
    result = rewritten(chain(spelling))
    assert str(result.module.graph) == str(result.captured.graph)
    assert (result.plan.low, result.plan.casts) == (frozenset(), ())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_a_graph_in_another_precision_stays_identical(dtype):
    result = run(lambda x, w: ((x @ w).tanh() @ w).sum(), X.to(dtype), W.to(dtype))
    assert str(result.module.graph) == str(result.captured.graph)
    assert {p.color for p in result.plan.paints.values()} == {Color.KEEP}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64, torch.int32])
def test_a_part_in_another_precision_is_left_alone(dtype):
    def function(x, w, other):
        h = x @ w
        return h, other @ other, h * other

    other = (4 * X).to(dtype)
    result = run(function, X, W, other)
    assert [t.dtype for t in result(X, W, other)] == [t.dtype for t in function(X, W, other)]
    assert result.color("allow2") is Color.KEEP
    assert torch.equal(result(X, W, other)[1], other @ other)


def test_a_deny_operator_upstream_keeps_infer_in_float32():
    result = rewritten(chain("wbgcgcw"))
    assert spelled(result) == "WbgcgCW"
    assert result.plan.paints["infer2"].because == "deny1"
    bounded = rewritten(chain("wngcgcw"))  # float32 again, because softmax's result is float32
    assert bounded.rule("infer1") == "nothing low upstream"


def test_what_has_no_elements_holds_no_digits():
    """A cache before its first token, as models of text begin with: keys and values go into it."""

    def function(x, w):
        cache = torch.cat([x.new_empty(0, SIZE), x @ w])
        return cache @ w, cache

    result = run(function, X, W)
    assert result.is_low("clear2") and not result.plan.paints["clear2"].wide
    low = ["x -> bfloat16", "w -> bfloat16"]
    assert result.casts() == [*low, "allow2 -> float32", "clear2 -> float32"]
    assert torch.equal(result(X, W)[1], (X.bfloat16() @ W.bfloat16()).float())


def test_what_has_elements_is_not_rounded_to_be_returned():
    def function(x, w):
        cache = torch.cat([x, x @ w])
        return cache @ w, cache

    result = run(function, X, W)
    assert not result.is_low("clear1")
    assert torch.equal(result(X, W)[1][:SIZE], X)


def test_outputs_keep_their_dtype():
    captured = chain("wcgbcwc", outputs="allow1 clear1 infer1 clear2 allow2")
    result = rewritten(captured)
    assert {t.dtype for t in result(X, W)} == {torch.float32}


def test_readers_share_one_cast():
    def function(x, w):
        h = x @ w
        return x @ h, x @ x, h.exp(), h.sum(), torch.softmax(h, -1)

    result = run(function, X, W)
    assert sorted(result.casts()) == sorted(
        ["x -> bfloat16", "w -> bfloat16"]
        + [f"{name} -> float32" for name in ("allow1", "allow2", "allow3")]
    )
    readers = {c.value: c.readers for c in result.plan.casts}
    assert readers["x"] == ("allow1", "allow2", "allow3")
    assert readers["allow1"] == ("deny1", "deny2", "deny3")  # a sum would widen what it reads


def test_an_operand_used_twice_is_cast_once():
    assert run(lambda x: x @ x, X).casts() == ["x -> bfloat16", "allow1 -> float32"]
    assert spelled(run(lambda x, w: ((h := x @ w) * h) @ w, X, W)) == "WGW"


def test_a_conversion_in_the_model_is_retargeted_not_doubled():
    result = run(lambda x, w: (x > 0.5).float() @ w, X, W)
    assert result.casts() == ["w -> bfloat16", "allow1 -> float32"]
    assert result.is_low("clear1")
    assert torch.equal(result(X, W), ((X > 0.5).bfloat16() @ W.bfloat16()).float())


@pytest.mark.parametrize("join", [torch.cat, torch.stack, torch.hstack])
def test_operators_on_lists_of_tensors(join):
    all_low = run(lambda x, w: join([x @ w, w @ x, x @ w]).exp(), X, W)
    assert all_low.is_low("clear1")
    assert len(all_low.casts()) == 3
    repeated = run(lambda x, w: join([h := x @ w, h, h]).exp(), X, W)
    assert repeated.casts() == ["x -> bfloat16", "w -> bfloat16", "allow1 -> float32"]  # less
    mixed = run(lambda x, w: join([x @ w, x]).exp(), X, W)
    assert not mixed.is_low("clear1")  # or x would come out rounded
    assert mixed.casts() == ["x -> bfloat16", "w -> bfloat16", "allow1 -> float32"]


UNARY = {
    "elu": F.elu,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "reciprocal": lambda x: torch.reciprocal(x + 1),
    "log": lambda x: torch.log(x + 1),
    "log1p": torch.log1p,
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: F.softmax(x, -1),
    "softplus": F.softplus,
    "sqrt": lambda x: torch.sqrt(x + 1),
    "tanh": torch.tanh,
    "abs": torch.abs,
}


@pytest.mark.parametrize("policy", [BFLOAT16, FLOAT16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", UNARY)
def test_unary_operators_between_matmuls(name, policy):
    def function(x, w):
        return UNARY[name](x @ w) @ w

    result = run(function, X, W / SIZE, policy=policy)
    assert result.is_low("allow1")
    assert result.is_low("allow2")
    tolerance = 2 * torch.finfo(policy.dtype).eps
    expected = function(X, W / SIZE)
    error = (result(X, W / SIZE) - expected).abs().max() / expected.abs().max()
    assert error < tolerance


class Block(nn.Module):
    """conv -> batch norm -> relu -> `between` -> conv."""

    def __init__(self, between):
        super().__init__()
        self.conv1, self.bn, self.conv2 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)
        self.between = between

    def forward(self, x):
        return self.conv2(self.between(F.relu(self.bn(self.conv1(x)))))


class FirstOf(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)[0]


def two_paths(x, w):
    left, right = (x @ w).relu(), x.exp() @ w
    return torch.cat([left, right]).softmax(-1) @ w


def attention(x, w):
    q, k, v = (x @ w).chunk(3, -1)
    scores = (q @ k.transpose(-1, -2)) * 0.5
    return x + scores.masked_fill(scores < 0, -3.4e38).softmax(-1) @ v


def embedded(tokens, table, w):
    x = F.embedding(tokens, table)
    x = x + F.layer_norm(x, (SIZE,)) @ w
    return x + F.gelu(F.layer_norm(x, (SIZE,)) @ w) @ w


IMAGE = torch.rand(2, 3, 10, 10)
MODELS = {
    "conv_bn": lambda: capture_module(Block(nn.Identity()), IMAGE),
    "conv_bn_eval": lambda: capture_module(Block(nn.Identity()).eval(), IMAGE),
    "conv_bn_dropout": lambda: capture_module(Block(nn.Dropout(0.3)), IMAGE),
    "conv_avg_pool": lambda: capture_module(Block(nn.AvgPool2d(2)), IMAGE),
    "conv_max_pool": lambda: capture_module(Block(nn.MaxPool2d(2)), IMAGE),
    "lstm": lambda: capture_module(FirstOf(nn.LSTM(4, 4)), torch.rand(5, 2, 4)),
    "two_paths": lambda: capture(two_paths, X, W, weights=1),
    "attention": lambda: capture(attention, X, torch.rand(SIZE, 3 * SIZE), weights=1),
    "residual_stream": lambda: capture(embedded, torch.arange(4), X, W, weights=2),
}


@pytest.mark.parametrize("case", MODELS)
def test_small_models(case):
    torch.manual_seed(0)
    assert_golden(case, compact(rewritten(MODELS[case]())))
