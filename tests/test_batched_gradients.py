"""Gradients of a graph for a batch of cotangents at once, and the derivatives of these.

PyTorch batches in two ways: `is_grads_batched`, which autograd.functional uses as well, has a vmap
of its own, older than torch.vmap.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._vmap_internals import _vmap as older_vmap
from training import FLOAT16, Mlp, X, assert_same_gradients, distance, scaled, twins

import amp_graph

SIZES = torch.tensor([0.5, 1.0, 2.0])
SMALL = 1e-6  # float16's smallest number is 6e-8, its smallest with full precision 6e-5

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Rows = Callable[..., Any]


def with_grads_batched(y: Tensor, inputs: Any, rows: Tensor, create_graph: bool = False) -> Any:
    return torch.autograd.grad(
        y, inputs, rows, is_grads_batched=True, create_graph=create_graph, retain_graph=True
    )


def with_vmap(y: Tensor, inputs: Any, rows: Tensor, create_graph: bool = False) -> Any:
    def of_one(row: Tensor) -> Any:
        return torch.autograd.grad(y, inputs, row, create_graph=create_graph, retain_graph=True)

    return torch.vmap(of_one)(rows)


BATCHED = pytest.mark.parametrize("batched", [with_grads_batched, with_vmap])


def identity(y: Tensor) -> Tensor:
    """Cotangents for the Jacobian of what each of a batch of vectors was made from."""
    return torch.eye(y.shape[-1])[:, None].expand(-1, *y.shape)


def pair(is_watched: bool) -> tuple[nn.Module, nn.Module]:
    """A model and a converted one, whose loss scale an optimizer watches over, or nobody."""
    if is_watched:
        return twins(Mlp(), scaled(2.0**10))
    plain = Mlp()
    return plain, amp_graph.convert(copy.deepcopy(plain), policy="float16")


WATCHED = pytest.mark.parametrize("is_watched", [True, False], ids=["watched", "unwatched"])


@BATCHED
def test_small_ones_choose_their_scale(batched: Rows) -> None:
    found = []
    for each in pair(is_watched=False):
        x = X.clone().requires_grad_()
        y = each(x)
        found += batched(y, x, identity(y) * SMALL)
    assert distance(found[1], found[0]) <= FLOAT16


@BATCHED
def test_large_ones_choose_their_scale(batched: Rows) -> None:
    """The largest of the batch does, so that no row of it is infinite."""
    found = []
    for each in pair(is_watched=False):
        x = X.clone().requires_grad_()
        y = each(x)
        size = torch.tensor([1.0, 1e4])[:, None, None]
        found += batched(y, x, identity(y) * size)
    assert distance(found[1], found[0]) <= FLOAT16


@BATCHED
@WATCHED
def test_a_penalty_on_the_jacobian(is_watched: bool, batched: Rows) -> None:
    plain, model = pair(is_watched)
    found = []
    for each in (plain, model):
        x = X.clone().requires_grad_()
        y = each(x)
        (jacobian,) = batched(y, x, identity(y), create_graph=True)
        (y.square().mean() + jacobian.square().mean()).backward()
        found.append((jacobian, x.grad))
    for value, reference in zip(found[1], found[0], strict=True):
        assert distance(value, reference) <= FLOAT16
    assert_same_gradients(model, plain)


@BATCHED
def test_a_penalty_alone(batched: Rows) -> None:
    """Of gradients of parameters, which are too small for float16 unless they are scaled."""
    plain, model = pair(is_watched=True)
    for each in (plain, model):
        y = each(X)
        rows = batched(y, [*each.parameters()], identity(y) * SMALL, create_graph=True)
        (sum(g.square().sum() for g in rows) / SMALL).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == 3  # the last bias' gradients do not depend on anything
    assert_same_gradients(model, plain)


@BATCHED
@WATCHED
def test_second_derivatives_batched(is_watched: bool, batched: Rows) -> None:
    """The Hessian of each input, and a loss made of it: the first derivatives are of one row, the
    second of a batch, the third of one."""
    plain, model = pair(is_watched)
    found = []
    for each in (plain, model):
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
        (hessian,) = batched(slope, x, identity(slope), create_graph=True)
        hessian.square().mean().backward()
        found.append((hessian, x.grad))
    for value, reference in zip(found[1], found[0], strict=True):
        assert distance(value, reference) <= FLOAT16
    assert_same_gradients(model, plain)


def test_a_batch_of_batches() -> None:
    plain, model = pair(is_watched=True)
    found = []
    for each in (plain, model):
        x = X.clone().requires_grad_()
        y = each(x)

        def of_outer(row: Tensor, x: Tensor = x, y: Tensor = y) -> Tensor:
            inner = older_vmap(lambda size: with_rows(y, x, row * size))(SIZES)
            return inner + with_rows(y, x, row)  # a batch at the outer level alone

        rows = older_vmap(of_outer)(identity(y))
        assert rows.shape == (2, 3, *X.shape)
        rows.square().mean().backward()
        found += [rows, x.grad]
    assert distance(found[2], found[0]) <= FLOAT16
    assert distance(found[3], found[1]) <= FLOAT16
    assert_same_gradients(model, plain)


def with_rows(y: Tensor, x: Tensor, row: Tensor) -> Tensor:
    return torch.autograd.grad(y, x, row, create_graph=True, retain_graph=True)[0]


def test_the_functional_interface() -> None:
    found = []
    for each in pair(is_watched=False):
        jacobian = torch.autograd.functional.jacobian(each, X, create_graph=True, vectorize=True)
        hessian = torch.autograd.functional.hessian(
            lambda x, each=each: each(x).square().sum(), X, create_graph=True, vectorize=True
        )
        each.zero_grad()
        (jacobian.square().sum() + hessian.square().sum()).backward()
        found.append((jacobian, hessian, *(p.grad for p in each.parameters())))
    for value, reference in zip(found[1], found[0], strict=True):
        assert distance(value, reference) <= FLOAT16
