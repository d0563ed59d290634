"""Comparisons that depend on data and decide nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from training import twins
from two_layers import Two

from amp_graph.convert import record_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(3))


def first_of_all(length: int, mask: Tensor | None, is_causal: bool) -> bool:
    return length > 1 and mask is None and is_causal


def before_the_mask(length: int, mask: Tensor | None, is_causal: bool) -> bool:
    return length >= 2 and is_causal and mask is None


def in_a_branch(length: int, mask: Tensor | None, is_causal: bool) -> bool:
    if length != 1 and mask is None and is_causal:
        mask = torch.ones(())
    return mask is not None


def in_a_branch_on_its_contrary(length: int, mask: Tensor | None, is_causal: bool) -> bool:
    is_full = not is_causal
    if length > 1 and mask is None and not is_full:
        mask = torch.ones(())
    return mask is not None


ASKING = (first_of_all, before_the_mask, in_a_branch, in_a_branch_on_its_contrary)


class OfVisible(Two):
    """Attention among the patches that a mask leaves, as of a masked autoencoder."""

    def __init__(self, asks: Callable[..., bool], is_causal: bool) -> None:
        super().__init__()
        self.asks, self.is_causal = asks, is_causal

    def forward(self, x: Tensor, is_hidden: Tensor) -> Tensor:
        h = self.a(x[~is_hidden].reshape(x.shape[0], -1, 8))
        heads = h.view(x.shape[0], -1, 2, 4).transpose(1, 2)
        causal = self.asks(heads.shape[2], None, self.is_causal)
        heads = F.scaled_dot_product_attention(heads, heads, heads, is_causal=causal)
        return self.b(heads.transpose(1, 2).reshape(h.shape))


def hidden(count: int) -> Tensor:
    """Hide so many of six patches."""
    return (torch.arange(6) < count).expand(2, 6)


@pytest.mark.parametrize("asks", ASKING)
def test_a_length_that_decides_nothing_ends_no_graph(asks: Callable[..., bool]) -> None:
    plain, model = twins(OfVisible(asks, is_causal=False), "bfloat16")
    for count in (2, 4, 5):
        expected = plain(X, hidden(count))
        torch.testing.assert_close(model(X, hidden(count)), expected, rtol=0.05, atol=0.05)
    record = record_of(model)
    assert not record.breaks and len(record.plans) == 1


@pytest.mark.parametrize("asks", ASKING)
def test_one_that_decides_something_is_asked(asks: Callable[..., bool]) -> None:
    plain, model = twins(OfVisible(asks, is_causal=True), "bfloat16")
    for count in (2, 5, 4):
        expected = plain(X, hidden(count))
        torch.testing.assert_close(model(X, hidden(count)), expected, rtol=0.05, atol=0.05)
    assert record_of(model).breaks


def test_nor_does_one_of_batches_that_vary() -> None:
    plain, model = twins(OfVisible(first_of_all, is_causal=False), "bfloat16")
    for size, count in ((2, 4), (3, 4), (5, 1), (4, 6), (3, 2)):
        x, is_hidden = X[:1].expand(size, 6, 8), hidden(count)[:1].expand(size, 6)
        torch.testing.assert_close(model(x, is_hidden), plain(x, is_hidden), rtol=0.05, atol=0.05)
    record = record_of(model)
    assert not record.breaks and len(record.plans) == 2
