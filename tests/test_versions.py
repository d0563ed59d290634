"""Autograd objects to a backward pass through weights that were changed where float32's would.

With one difference: the low-precision weights change when a graph next runs, not before. So a
step between forward and backward is no error as long as no other forward lies between, and the
gradients are those of the weights that the forward saw.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from training import FLOAT16, Mlp, X, assert_same_gradients, distance, scaled, twins

import amp_graph

SCALED = scaled(2.0**8)


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def forward(model: nn.Module) -> None:
    model(X)


def forward_in_eval(model: nn.Module) -> None:
    with torch.no_grad():
        model(X)


def step(kind: Any, **options: Any) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        optimizer = kind(model.parameters(), lr=0.1, **options)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()

    return change


def data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(1.0)


def copy_(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.clone())


BETWEEN: dict[str, list[Callable[[nn.Module], None]]] = {
    "nothing": [],
    "a forward": [forward],
    "a forward without gradients": [forward_in_eval],
    "an optimizer step": [step(SGD)],
    "an optimizer step and a forward": [step(SGD), forward],
    "a forward and an optimizer step": [forward, step(SGD)],
    "a foreach step and a forward": [step(Adam, foreach=True), forward],
    "copy_ and a forward": [copy_, forward],
    "copy_, and a forward in eval": [copy_, forward_in_eval],
    "two steps and two forwards": [step(SGD), forward, step(SGD), forward],
    "the same through .data and a forward": [data, forward],
    "a fused step and a forward": [step(SGD, fused=True), forward],
}


def objects(model: nn.Module, between: list[Callable[[nn.Module], None]]) -> bool:
    """Whether a backward pass after the changes raises; if not, gradients stay in the model."""
    step(SGD)(model)
    loss = model(X).square().mean()
    for change in between:
        change(model)
    return refuses(loss)


def refuses(loss: Tensor) -> bool:
    try:
        loss.backward()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return True
    return False


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN.keys())
def test_objects_where_float32_objects(between: list[Callable[[nn.Module], None]]) -> None:
    start = Mlp()
    start_again = copy.deepcopy(start)
    plain, model = twins(start, SCALED)
    expected = objects(plain, between)
    ran_since = not between or between[-1] in (forward, forward_in_eval)
    assert objects(model, between) is (expected and ran_since)
    if expected and not ran_since:
        plain = start_again
        objects(plain, [])
    if not expected or not ran_since:
        assert_same_gradients(model, plain)


def test_that_some_of_these_do_object() -> None:
    """The measure of the test above: float32's own answers."""
    answers = {name: objects(Mlp(), between) for name, between in BETWEEN.items()}
    assert answers["an optimizer step and a forward"] and answers["copy_ and a forward"]
    assert not answers["nothing"] and not answers["the same through .data and a forward"]


def test_a_backward_pass_sees_the_weights_of_its_forward() -> None:
    """Two forwards, then two backward passes, as with two losses that share a model."""
    plain, model = twins(Mlp(), SCALED)
    for each in (plain, model):
        first, second = each(X).square().mean(), each(2 * X).abs().mean()
        second.backward()
        first.backward()
    assert_same_gradients(model, plain)


def test_a_step_that_was_skipped_does_not_count_as_a_change() -> None:
    model = amp_graph.convert(Mlp(), policy=SCALED)
    optimizer = SGD(model.parameters(), lr=0.1)
    model(X).sum().backward()
    optimizer.step()
    loss = model(X).square().mean()
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.inf)
    optimizer.step()
    model.zero_grad()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


MODES: dict[str, Callable[[], Any]] = {
    "training": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("second", MODES)
@pytest.mark.parametrize("third", MODES)
def test_one_mode_after_another(first: str, second: str, third: str) -> None:
    plain, model = twins(Mlp(), SCALED)
    for mode in (first, second, third, "training"):
        for each in (plain, model):
            each.train(mode == "training")
            with MODES[mode]():
                each.out = each(X)
            if mode == "training":
                each.zero_grad()
                each.out.square().mean().backward()
                torch._foreach_sub_([p.data for p in each.parameters()], 0.01)
        assert distance(model.out.clone(), plain.out.clone()) <= FLOAT16
        assert model.out.requires_grad is plain.out.requires_grad
        assert model.out.is_inference() is plain.out.is_inference()
    assert_same_gradients(model, plain)


@pytest.mark.filterwarnings("error::amp_graph.ConversionWarning")
def test_a_model_made_in_inference_mode() -> None:
    with torch.inference_mode():
        plain = Mlp()
        expected = plain(X)
        model = amp_graph.convert(plain, policy=SCALED)
        assert 0 < distance(model(X), expected) <= FLOAT16
        model.first.weight.mul_(2)
        assert distance(model(X), amp_graph.restore(model)(X)) <= FLOAT16


def test_a_write_to_the_output_before_backward() -> None:
    plain, model = twins(Mlp(), SCALED)
    for each in (plain, model):
        out = each(X)
        with torch.no_grad():
            out.mul_(0.5)
        assert not refuses(out.sum())
    assert_same_gradients(model, plain)


def test_a_write_to_the_input_before_backward() -> None:
    """Float32 refuses. Here backward reads the input's low-precision copy, which is intact."""
    x, again = X.clone(), X.clone()
    plain, model = twins(Mlp(), SCALED)
    out = model(x)
    plain(again).sum().backward()
    x.zero_()
    assert not refuses(out.sum())
    assert_same_gradients(model, plain)
