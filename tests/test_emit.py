"""What emitted graphs look like and compute: casts, writes into memory, operators of all kinds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from counting import CastCounter
from graphs import FLOAT16, SIZE, W, X, capture_module, rewritten, run
from torch import nn

from amp_graph.ir import Color

XL, WL = X.bfloat16(), W.bfloat16()


def test_each_value_is_cast_once_per_direction():
    def function(x, w):
        h = x @ w
        return h.exp() + h.cumsum(0), (x @ h) @ w, x.log()

    result = run(function, X, W)
    assert len(result.nodes("_to_copy")) == len(result.plan.casts)
    assert len({(c.value, c.dtype) for c in result.plan.casts}) == len(result.plan.casts)
    assert result.casts().count("x -> bfloat16") == 1
    assert result.casts().count("allow1 -> float32") == 1


@pytest.mark.parametrize("move", [torch.clone, torch.t, lambda x: x], ids=["clone", "t", "none"])
@pytest.mark.parametrize("records", [True, False])
def test_gradients_of_many_readers_of_a_cast_are_added_up_in_float32(records, move):
    """What each step of a decoder reads of its encoder. Added up in bfloat16, gradients stop
    growing at 256 times one of them."""
    steps = 300

    def function(x, w):
        memory = move(x.exp())
        return sum((memory @ w).sum() for _ in range(steps)) / steps

    with torch.set_grad_enabled(records):
        result = run(function, X.clone().requires_grad_(), W)
    casts = [c for c in result.plan.casts if c.value in ("deny1", "clear1")]
    assert len(casts) == (19 if records else 1)
    if records:
        assert sum(len(c.readers) for c in casts) == steps
        with_casts, exact = X.clone().requires_grad_(), X.clone().requires_grad_()
        result(with_casts, W).backward()
        function(exact, W).backward()
        assert (with_casts.grad - exact.grad).norm() < 0.01 * exact.grad.norm()


LOOKUPS = {
    "index": lambda table, i: table[i],
    "embedding": lambda table, i: F.embedding(i, table),
}


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize(("times", "is_low"), [(2000, False), (100, True)])
def test_gradients_of_what_is_looked_up_often_are_added_up_in_float32(name, times, is_low):
    """The few relations of a knowledge graph, or the one graph of many nodes. Readers are low."""
    indices = torch.arange(SIZE).repeat(times)

    def function(x, w, i):
        return (LOOKUPS[name](x @ w, i).relu() @ w).mean()

    result = run(function, X, W, indices)
    assert [result.is_low(n) for n in ("infer1", "allow1", "allow2")] == [is_low, True, True]
    if is_low:
        return
    x, exact = X.clone().requires_grad_(), X.clone().requires_grad_()
    result(x, W, indices).backward()
    function(exact, W, indices).backward()
    assert (x.grad - exact.grad).norm() < 0.02 * exact.grad.norm()


def test_a_cast_serves_those_who_would_take_either():
    """The tanh form of GELU: autograd casts the gradient of each operand that it widened."""

    def function(x, w):
        h = x @ w
        return (h + 0.044715 * h.pow(3)).tanh()

    result = run(function, X, W)
    (cast,) = (c for c in result.plan.casts if c.value == "allow1")
    assert len(cast.readers) == 2
    with CastCounter() as counter:
        result(X.clone().requires_grad_(), W).sum().backward()
    assert counter.backward.shapes[torch.bfloat16, (SIZE, SIZE)] == 1


def test_factories_and_conversions_are_retargeted():
    def function(x, w, i):
        ones = torch.ones(SIZE, SIZE)
        return ones @ w, i.to(torch.float32) @ w, torch.zeros_like(x) @ w, i.float() @ w

    result = run(function, X, W, torch.arange(SIZE * SIZE).view(SIZE, SIZE))
    assert "w -> bfloat16" in result.casts()
    assert not [c for c in result.plan.casts if c.value.startswith("clear")]


def test_a_factory_shaped_like_a_low_value_keeps_its_own_precision():
    def function(x, w):
        h = x @ w
        return torch.ones_like(h).exp(), h.new_full((2,), 1 / 3), torch.empty_like(h).shape[0]

    result = run(function, X, W)
    ours, theirs = result(X, W), function(X, W)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


def test_scalars_of_no_dimensions_are_not_cast():
    def function(x, w, scale):
        return ((x @ w) * scale + scale) @ w

    result = run(function, X, W, torch.tensor(1 / 3))
    assert [c.value for c in result.plan.casts] == ["x", "w", "allow2"]


@pytest.mark.parametrize("operand", ["left", "right"])
def test_an_allowed_operator_on_a_scalar_still_works(operand):
    def function(x, w, scale):
        pair = (scale, x @ w) if operand == "left" else (x @ w, scale)
        return torch.lerp(*pair, 0.5), torch.where(x > 0.5, *pair), torch.maximum(*pair)

    args = X, W, torch.tensor(1 / 3)
    torch.testing.assert_close(run(function, *args)(*args), function(*args), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("policy_dtype", [torch.bfloat16, torch.float16])
def test_batch_norm_keeps_and_updates_float32_statistics(policy_dtype):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x):
            return self.norm(self.conv(x)).relu()

    torch.manual_seed(0)
    net, x = Net(), torch.rand(2, 3, 6, 6)
    policy = FLOAT16 if policy_dtype is torch.float16 else None
    result = rewritten(capture_module(net, x), *([policy] if policy else []))
    assert result.is_low("deny1")
    (norm,) = result.nodes("batch_norm")
    operands = [a.meta["val"].dtype for a in norm.args[:5]]
    assert operands == [policy_dtype, *[torch.float32] * 4]

    buffers = [b.clone() for b in net.buffers()]
    result(x, *buffers, *net.parameters())
    net(x)
    for ours, theirs in zip(buffers, net.buffers(), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0.01, atol=0.01)
    assert int(buffers[-1]) == 1


def test_results_of_a_tuple_follow_their_operator():
    def function(x, w):
        h = x @ w
        values, indices = h.topk(2)
        low, high = h.chunk(2, -1)
        mean, var = torch.var_mean(h, 0)
        return values @ w[:2], indices, low @ high.t(), mean * var

    result = run(function, X, W)
    facts = result.plan.facts
    for name in [n for n in facts if facts[n].op == "getitem"]:
        (parent,) = facts[name].reads
        assert result.is_low(name) == result.is_low(parent)
    ours, theirs = result(X, W), function(X, W)
    assert [t.dtype for t in ours] == [t.dtype for t in theirs]
    torch.testing.assert_close(ours[2], theirs[2], rtol=0.02, atol=0.02)


def test_gradients_arrive_in_float32():
    def function(x, w):
        return (F.layer_norm((x @ w).tanh() @ w, (SIZE,)) * x).square().mean()

    result = run(function, X, W, weights=1)
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    ours = torch.autograd.grad(result(x, w), (x, w))
    theirs = torch.autograd.grad(function(x, w), (x, w))
    assert {g.dtype for g in ours} == {torch.float32}
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() < 0.05 * b.norm()


def test_the_emitted_graph_ignores_autocast_dtypes_of_the_capture():
    """What is kept runs on the operands it was captured with, low neighbours or not."""

    def function(x, w, d):
        h = x @ w
        return h.double() + d, h.half(), h.to(torch.bfloat16) @ w.bfloat16()

    result = run(function, X, W, X.double())
    assert [t.dtype for t in result(X, W, X.double())] == [
        torch.float64,
        torch.float16,
        torch.bfloat16,
    ]
    assert result.color("allow2") is Color.KEEP


def test_dropout_that_drops_nothing_shares_memory_with_what_it_was_given():
    def function(x, w):
        product = x @ w
        torch.dropout(product, 0.5, False).clamp_(max=0.5)
        return product @ w

    exact = function(X, W)
    ours = run(function, X, W)(X, W)
    assert (ours - exact).norm() < 0.02 * exact.norm()  # a few roundings to 8 bits
