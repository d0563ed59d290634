"""Autograd objects to a backward pass through changed weights exactly where it does in float32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from training import FLOAT16, Mlp, assert_same_gradients, distance, scaled, twins

import amp_graph

SCALED = scaled(2.0**8)
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


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
    "a step, before the loss's forward only": [],
}


def objects(model: nn.Module, between: list[Callable[[nn.Module], None]]) -> bool:
    """Whether a backward pass after the changes raises; if not, gradients stay in the model."""
    step(SGD)(model)
    loss = model(X).square().mean()
    for change in between:
        change(model)
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return True
    return False


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN.keys())
def test_objects_where_float32_objects(between: list[Callable[[nn.Module], None]]) -> None:
    plain, model = twins(Mlp(), SCALED)
    expected = objects(plain, between)
    assert objects(model, between) is expected
    if not expected:
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


def test_a_model_made_in_inference_mode_behaves_as_before() -> None:
    with torch.inference_mode():
        plain = Mlp()
        expected = plain(X)
        model = amp_graph.convert(plain, policy=SCALED)
        assert distance(model(X), expected) <= FLOAT16


@pytest.mark.parametrize("written", ["the output", "the input"])
def test_writes_between_forward_and_backward(written: str) -> None:
    """Writing to what backward needs raises in both; to what it does not, in neither."""

    def run(model: nn.Module) -> tuple[bool, list[Tensor]]:
        x = X.clone()
        out = model(x)
        with torch.no_grad():
            (out if written == "the output" else x).mul_(0.5)
        try:
            out.square().mean().backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            return True, []
        return False, [p.grad for p in model.parameters()]

    plain, model = twins(Mlp(), SCALED)
    raised, expected = run(plain)
    assert raised is (written == "the input")
    found, grads = run(model)
    if not found:
        # float32 would have had to object: its backward pass reads the input. Ours reads the
        # input's low-precision copy, which still holds the value that the output was made of.
        unwritten = twins(Mlp(), SCALED)[0]
        unwritten.load_state_dict(plain.state_dict())
        unwritten(X).square().mean().backward()
        reference = expected or [p.grad for p in unwritten.parameters()]
        for value, truth in zip(grads, reference, strict=True):
            assert distance(value, truth) <= FLOAT16
    assert found is raised or written == "the input"
