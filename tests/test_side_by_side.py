"""Parts of a tensor that are taken out together: which, and that nothing else changes."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from counting import Names
from graphs import trace
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import amp_graph
from amp_graph.graphs.side_by_side import join_parts


def joined(function: Any, *args: Tensor) -> tuple[Any, Counter[str]]:
    """The graph with parts joined, and how often each operator is in it."""
    module = join_parts(trace(function, args))
    module.graph.lint()
    return module, Counter(getattr(n.target, "__name__", n.op) for n in module.graph.nodes)


def gradient(function: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = function(x)
    (found,) = torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), x)
    return y.detach(), found


def assert_same(function: Any, x: Tensor) -> Counter[str]:
    """To the bit, values and gradients."""
    module, operators = joined(function, x)
    for ours, theirs in zip(gradient(module, x), gradient(function, x), strict=True):
        assert torch.equal(ours, theirs)
    return operators


X = torch.randn(3, 4, 6)


def test_one_by_one_along_a_dimension() -> None:
    operators = assert_same(lambda x: (x[0] * x[1]).exp() + x[2], X)
    assert operators["unbind.int"] == 1 and not operators["select.int"]


def test_parts_of_parts() -> None:
    def function(x: Tensor) -> Tensor:
        first, second, third = x[0], x[1], x[2]
        return first[:2] * first[2:].exp() + second[:2] + second[2:] * third[2:]

    operators = assert_same(function, X)
    assert operators["unbind.int"] == 1 and operators["split_with_sizes.default"] == 2
    assert operators["slice.Tensor"] == 1


def test_in_front_and_behind() -> None:
    """As in rotary embeddings."""

    def rotated(x: Tensor) -> Tensor:
        return torch.cat([-x[..., 3:], x[..., :3]], -1) * x

    operators = assert_same(rotated, X)
    assert operators["split_with_sizes.default"] == 1 and not operators["slice.Tensor"]


@st.composite
def cuts(draw: Any) -> tuple[int, list[tuple[int | None, int | None]]]:
    """A dimension, and spans along it: mostly all of it, in any order, some of them twice."""
    dimension = draw(st.integers(-3, 2))
    size = X.shape[dimension]
    inner = draw(st.sets(st.integers(1, size - 1), max_size=3))
    bounds = [0, *sorted(inner), size]
    spans = [*pairwise(bounds)]
    spans = draw(st.permutations(spans + draw(st.lists(st.sampled_from(spans), max_size=2))))
    if len(spans) > 1 and draw(st.booleans()):
        spans.pop()

    def spelled(bound: int) -> int | None:
        edge = {0: None, size: draw(st.sampled_from([None, size, size + 3]))}
        return edge[bound] if bound in edge else draw(st.sampled_from([bound, bound - size]))

    return dimension, [(spelled(a), spelled(b)) for a, b in spans]


@settings(deadline=None, max_examples=60)
@given(cuts())
def test_any_parts_by_any_names(drawn: Any) -> None:
    dimension, spans = drawn
    size = X.shape[dimension]

    def parts(x: Tensor) -> Tensor:
        taken = [x[*[slice(None)] * (dimension % 3), a:b].sum(dimension) for a, b in spans]
        return torch.stack([k * t for k, t in enumerate(taken, 2)])

    operators = assert_same(parts, X)
    bounds = {range(size)[slice(*span)] for span in spans}
    is_whole = len({i for b in bounds for i in b}) == size and len(bounds) > 1
    assert operators["split_with_sizes.default"] == is_whole


def test_by_turns() -> None:
    """As in rotary embeddings of GPT-J."""

    def rotated(x: Tensor) -> Tensor:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * x

    operators = assert_same(rotated, X)
    assert operators["unflatten.int"] == operators["unbind.int"] == 1
    assert not operators["slice.Tensor"]


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 4), st.integers(2, 12), st.data())
def test_any_parts_by_turns(step: int, size: int, data: Any) -> None:
    starts = data.draw(st.lists(st.integers(0, step - 1), min_size=step, max_size=step + 1))
    x = torch.linspace(-1, 1, 2 * size).view(2, size)
    operators = assert_same(
        lambda x: torch.stack([k * x[:, a::step].sum(-1).exp() for k, a in enumerate(starts, 2)]), x
    )
    is_whole = {*starts} == {*range(step)} and size % step == 0
    assert operators["unbind.int"] == operators["unflatten.int"] == is_whole


def writes(x: Tensor) -> Tensor:
    y = x * 2
    a, b = y[0:1], y[1:3]
    a.mul_(3)
    return a + b


def gap(x: Tensor) -> Tensor:
    return x[0] + x[2]


def overlap(x: Tensor) -> Tensor:
    return x[:2].sum(0) + x[1:].sum(0)


def turns_that_do_not_end_together(x: Tensor) -> Tensor:
    return x[::2].sum(0) + x[1::2].sum(0)


@pytest.mark.parametrize("function", [writes, gap, overlap, turns_that_do_not_end_together])
def test_what_stays(function: Any) -> None:
    operators = assert_same(function, X)
    assert not operators["unbind.int"] + operators["split_with_sizes.default"]


def test_what_is_returned_stays() -> None:
    """It may be written to."""
    _, operators = joined(lambda x: [x.exp(), x[:1], x[1:]], X)
    assert operators["slice.Tensor"] == 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def test_a_tensor_that_is_unpacked_is_so_in_a_converted_model() -> None:
    model = amp_graph.convert(Attention(), policy="bfloat16")
    x = torch.randn(2, 5, 8)
    model(x).sum().backward()
    with Names() as counted:
        model(x).sum().backward()
    names = Counter(counted.names)
    assert names["unbind"] == names["stack"] == 1
    assert not names["select"] + names["select_backward"]


def test_a_part_that_is_taken_without_recording_stays_so() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            with torch.no_grad():
                gate = y[:, :4]
            return gate * y[:, 4:]

    model, x = Gate(), torch.randn(6, 8)
    model(x).sum().backward()
    exact = model.layer.weight.grad
    model.zero_grad()
    amp_graph.convert(model, policy="bfloat16")(x).sum().backward()
    assert torch.equal(model.layer.weight.grad[:4], torch.zeros(4, 8))
    torch.testing.assert_close(model.layer.weight.grad, exact, rtol=0.05, atol=0.05)


def test_steps_of_a_long_sequence_have_one_cast() -> None:
    """One before they are taken apart, not one for each."""

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.zeros(2, 8)
            for t in range(x.shape[1]):
                h = torch.tanh(self.cell(x[:, t]) + h)
            return h

    model = amp_graph.convert(Cell(), policy="bfloat16")
    model(torch.randn(2, 20, 8))
    (plan,) = amp_graph.plans(model)
    assert sum(cast.dtype is torch.bfloat16 and not cast.is_weight for cast in plan.casts) == 1
