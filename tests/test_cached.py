"""Models that call cached functions, and have cached properties."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_remembering import Remembering
from torch import Tensor

import amp_graph
from amp_graph.convert import record_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@functools.lru_cache
def counted_up(n: int) -> Tensor:
    return torch.arange(n) + 1.0


def test_a_cached_function_that_computes_the_same_each_time_ends_no_graph() -> None:
    class CountedUp(Remembering):
        def gain(self, x: Tensor) -> Any:
            return counted_up(4)

    model = amp_graph.convert(CountedUp(), policy="bfloat16")
    model(torch.ones(1, 4))
    (plan,) = amp_graph.plans(model)
    assert plan.fallback is None


DRAW = {
    "alpha_dropout": lambda: F.alpha_dropout(torch.ones(4), training=True),
    "rrelu": lambda: F.rrelu(-torch.ones(4), training=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(torch.ones(4)),
    "attention": lambda: F.scaled_dot_product_attention(*torch.ones(3, 4, 4), dropout_p=0.5)[0],
    "uniform_": lambda: torch.empty(4).uniform_(),
}


@pytest.mark.parametrize("drawn", DRAW)
def test_what_a_cached_function_draws_is_drawn_once(drawn: str) -> None:
    cached = functools.lru_cache(DRAW[drawn])

    class DrawsOnce(Remembering):
        def gain(self, x: Tensor) -> Any:
            return cached()

    model = amp_graph.convert(DrawsOnce(), policy="bfloat16")
    assert torch.equal(model(torch.ones(1, 4)), model(torch.ones(1, 4)))


@functools.lru_cache
def normalized(n: int) -> Tensor:
    return F.normalize(torch.arange(1.0, n + 1), dim=0)


def test_a_name_that_begins_like_one_that_draws_does_not() -> None:
    class Normalized(Remembering):
        def gain(self, x: Tensor) -> Any:
            return normalized(4)

    model = amp_graph.convert(Normalized(), policy="bfloat16")
    model(torch.ones(1, 4))
    assert len(amp_graph.plans(model)) == 1


class Named:
    """No module."""

    def __init__(self) -> None:
        self.names = {"a": 1, "b": 3}

    @functools.cached_property
    def columns(self) -> list[int]:
        return sorted(self.names.values())


class Lazy(Remembering):
    """Finds out at its first call what it goes by."""

    def __init__(self) -> None:
        super().__init__()
        self.named = Named()

    @functools.cached_property
    def weights(self) -> Tensor:
        return torch.arange(4.0)

    def gain(self, x: Tensor) -> Any:
        return self.weights[self.named.columns].sum()


@pytest.mark.filterwarnings("error::amp_graph.ConversionWarning")
def test_a_cached_property_is_captured_where_it_is_computed() -> None:
    plain = Lazy()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for _ in range(3):
        torch.testing.assert_close(
            model(torch.ones(1, 4)), plain(torch.ones(1, 4)), rtol=0.02, atol=0.02
        )
    assert torch.equal(model.__dict__["weights"], plain.weights)
    assert vars(model.named) == vars(plain.named)
    assert not record_of(model).breaks and len(amp_graph.plans(model)) == 2


@functools.lru_cache
def mapped(n: int) -> Tensor:
    return torch.vmap(lambda row: row.cumsum(0))(torch.ones(n, n))


@functools.lru_cache
def turned(n: int) -> Tensor:
    return torch.ones(n, 2 * n).t_() @ torch.ones(n, n)


@pytest.mark.parametrize("cached", [mapped, turned])
def test_a_cached_function_that_transforms_is_captured(cached: Any) -> None:
    class Transforms(Remembering):
        def gain(self, x: Tensor) -> Any:
            return cached(4).sum()

    model = amp_graph.convert(Transforms(), policy="bfloat16")
    model(torch.ones(1, 4))
    (plan,) = amp_graph.plans(model)
    assert plan.fallback is None
