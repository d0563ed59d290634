"""What emitted graphs do with memory that is written to, or shared."""

from __future__ import annotations

import pytest
import torch
from graphs import SIZE, W, X, run

XL, WL = X.bfloat16(), W.bfloat16()


def test_a_cast_is_made_again_after_its_value_was_written():
    def function(x, w):
        buffer = x.exp()
        first = buffer @ w
        buffer.mul_(2.0)
        return first, buffer @ w

    result = run(function, X, W)
    first, second = result(X, W)
    torch.testing.assert_close(second, 2 * first, rtol=0.01, atol=0.01)
    assert result.casts().count("deny1 -> bfloat16") == 1
    assert result.casts().count("w -> bfloat16") == 1


def test_a_cast_of_a_view_is_made_again_after_its_base_was_written():
    def function(x, w):
        base = x.exp()
        view = base.t()
        first = view @ w
        base[0].zero_()
        return first, view @ w

    result = run(function, X, W)
    torch.testing.assert_close(result(X, W)[1], function(X, W)[1], rtol=0.01, atol=0.01)


def test_a_cast_of_an_input_is_made_again_after_the_input_was_written():
    def function(x, w):
        first = x @ w
        x.add_(1.0)
        return first, x @ w

    result = run(function, X, W)
    ours, theirs = X.clone(), X.clone()
    outputs, expected = result(ours, W), function(theirs, W)
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(outputs, expected, rtol=0.01, atol=0.01)
    assert {"x -> bfloat16", "infer1 -> bfloat16"} < set(result.casts())


def test_writes_into_low_memory_stay_low():
    def function(x, w):
        h = x @ w
        h.relu_()
        h[0].mul_(0.5)
        return h @ w

    result = run(function, X, W)
    assert {"allow1", "allow2"} < result.plan.low
    assert [c.value for c in result.plan.casts] == ["x", "w", "allow2"]
    h = (XL @ WL).relu_()
    h[0].mul_(0.5)
    assert torch.equal(result(X, W), (h @ WL).float())


def test_a_denied_write_makes_the_memory_float32():
    def function(x, w):
        h = x @ w
        h.sub_(1.0).exp_()
        return h

    result = run(function, X / SIZE, W)
    exact = ((X / SIZE).bfloat16() @ WL).float().sub_(1.0).exp_()
    assert torch.equal(result(X / SIZE, W), exact)
    assert result.is_low("allow1")
    assert len(result.nodes("_to_copy")) == 3


def test_outputs_go_on_sharing_memory_that_was_made_from_a_low_operand():
    """As logits do and their transpose, which a model returns both."""

    def function(x, w):
        h = x @ w + w[0]
        return h, h.t()

    result = run(function, X, W)
    assert result.is_low("allow1")
    logits, transposed = result(X, W)
    assert logits.dtype is torch.float32
    assert transposed.data_ptr() == logits.data_ptr()
    torch.testing.assert_close(logits, (XL @ WL).float() + W[0])


def test_a_view_written_in_float32_is_seen_through_its_base():
    def function(x, w):
        h = x @ w
        h[0].exp_()
        return h.sum(), h[0]

    torch.testing.assert_close(run(function, X, W)(X, W), function(X, W), rtol=0.02, atol=0.02)


def test_foreach_writes_into_a_low_result():
    """The operator returns nothing that would show whose memory it wrote."""

    def function(x, w):
        h, g = x @ w, x.exp()
        view = h[0]
        torch._foreach_add_([h, g], 1.0)
        return h @ w, g, view.sum()

    torch.testing.assert_close(run(function, X, W)(X, W), function(X, W), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("view", [lambda h: h[0], lambda h: h.view(-1), lambda h: h.t()])
def test_outputs_that_share_memory_do_not_keep_their_operator_from_running_low(view):
    def function(x, w):
        h = x @ w
        return h, view(h), h @ w

    result = run(function, X, W)
    assert result.is_low("allow1")
    h, viewed, _ = result(X, W)
    assert torch.equal(h, (XL @ WL).float())
    assert torch.equal(viewed, view(h))
    assert viewed.untyped_storage().data_ptr() == h.untyped_storage().data_ptr()


def test_one_of_several_results_that_shares_memory_with_an_output():
    """As `torch.distributions.Normal` makes them of its mean and its deviation."""

    def function(x, w):
        mean, deviation = (x @ w).chunk(2, -1)
        return mean, deviation, *torch.broadcast_tensors(mean, deviation.exp())

    result = run(function, X, W)
    assert result.is_low("allow1")
    mean, deviation, again, _ = result(X, W)
    assert torch.equal(torch.cat([mean, deviation], -1), (XL @ WL).float())
    assert again.data_ptr() == mean.data_ptr()


def test_low_values_written_into_float32_memory():
    def function(x, w):
        out = torch.exp(x)
        out[0] = (x @ w)[0]
        out.copy_(x @ w + out)
        return out

    result = run(function, X, W)
    torch.testing.assert_close(result(X, W), function(X, W), rtol=0.02, atol=0.02)
