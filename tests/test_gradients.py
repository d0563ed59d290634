"""Every gradient outside of a converted model is true, however it was asked for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import (
    FLOAT16,
    Mlp,
    X,
    Y,
    assert_same_gradients,
    distance,
    gradients,
    overflow,
    scaled,
    twins,
)

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def loss_of(model: nn.Module, x: Tensor = X) -> Tensor:
    return (model(x) - Y).square().mean()


def assert_close(values: Any, references: Any, within: float = FLOAT16) -> None:
    for value, reference in zip(values, references, strict=True):
        assert distance(value, reference) <= within


@pytest.mark.parametrize("magnitude", [1.0, 1e-7], ids=["ordinary", "beneath float16"])
def test_backward(magnitude: float) -> None:
    plain, model = twins(Mlp())
    for each in (plain, model):
        (loss_of(each) * magnitude).backward()
    assert_same_gradients(model, plain)


def test_without_a_scale_small_gradients_are_lost() -> None:
    """The measure of the test above."""
    _, model = twins(Mlp(), amp_graph.Policy("float16", loss_scale=None))
    (loss_of(model) * 1e-7).backward()
    assert not any(g.any() for g in gradients(model)[:2])


@pytest.mark.parametrize("wrt", ["parameters", "input", "both", "one of the parameters"])
def test_autograd_grad(wrt: str) -> None:
    found = []
    for model in twins(Mlp()):
        x = X.clone().requires_grad_(wrt in ("input", "both"))
        parameters = list(model.parameters())
        inputs = {"parameters": parameters, "input": [x], "both": [x, *parameters]}
        loss = loss_of(model, x) * 1e-6
        found.append(torch.autograd.grad(loss, inputs.get(wrt, parameters[:1])))
        assert gradients(model) == [None] * 4 and x.grad is None
    assert_close(found[1], found[0])


def test_backward_into_some_inputs() -> None:
    plain, model = twins(Mlp())
    for each in (plain, model):
        x = X.clone().requires_grad_()
        loss_of(each, x).backward(inputs=[each.first.weight, x])
        each.x = x.grad
    assert_same_gradients(model, plain)
    assert distance(model.x, plain.x) <= FLOAT16
    assert model.second.weight.grad is None


def test_retain_graph_accumulates_the_same_gradient_twice() -> None:
    plain, model = twins(Mlp())
    for each in (plain, model):
        loss = loss_of(each)
        loss.backward(retain_graph=True)
        once = [g.clone() for g in gradients(each)]
        loss.backward()
        for once_more, g in zip(gradients(each), once, strict=True):
            assert torch.equal(once_more, 2 * g)
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("order", ["one after the other", "summed"])
def test_several_losses_accumulate(order: str) -> None:
    plain, model = twins(Mlp())
    for each in (plain, model):
        losses = [loss_of(each), each(X).abs().mean() * 1e-5, loss_of(each, 2 * X)]
        if order == "summed":
            sum(losses).backward()
        for loss in losses if order != "summed" else []:
            loss.backward()
    assert_same_gradients(model, plain)


def test_the_scale_may_change_between_forward_and_backward() -> None:
    """Accumulation over a step of the scale: what came in by a factor goes out by the same."""
    plain, model = twins(Mlp(), scaled(2.0**12, growth_interval=1))
    scale = amp_graph.scale_of(model)
    for each in (plain, model):
        early = loss_of(each)
        loss_of(each, 2 * X).backward()
        if each is model:
            assert amp_graph.has_finite_gradients(model)
        loss_of(each, 3 * X).backward()  # its forward ends the round
        early.backward()
    assert scale.get_scale() == 2.0**13
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("kind", ["parameter", "post accumulate", "output", "input"])
def test_hooks_see_true_gradients(kind: str) -> None:
    seen: list[list[Tensor]] = []
    for model in twins(Mlp()):
        mine: list[Tensor] = []
        x = X.clone().requires_grad_()
        weight = model.first.weight
        if kind == "parameter":
            weight.register_hook(lambda g, mine=mine: mine.append(g.clone()))
        if kind == "post accumulate":
            weight.register_post_accumulate_grad_hook(
                lambda p, mine=mine: mine.append(p.grad.clone())
            )
        if kind == "input":
            x.register_hook(lambda g, mine=mine: mine.append(g.clone()))
        out = model(x)
        if kind == "output":
            out.register_hook(lambda g, mine=mine: mine.append(g.clone()))
        (out - Y).square().mean().mul(1e-6).backward()
        assert len(mine) == 1
        seen.append(mine)
    assert_close(seen[1], seen[0])


def test_a_hook_may_replace_a_gradient() -> None:
    plain, model = twins(Mlp())
    for each in (plain, model):
        each.first.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
        each.second.weight.register_hook(lambda g: g * 3)
        loss_of(each).backward()
        assert each.first.weight.grad.abs().max() == torch.tensor(0.01)
    assert_same_gradients(model, plain, within=2 * FLOAT16)  # clamping keeps the smaller elements


def test_module_hooks_of_the_model_see_true_gradients() -> None:
    seen: list[tuple[Tensor, Tensor]] = []
    for model in twins(Mlp()):
        x = X.clone().requires_grad_()
        model.register_full_backward_hook(lambda m, i, o: seen.append((i[0], o[0])))
        loss_of(model, x).backward()
    assert_close(seen[1], seen[0])


def test_optimizer_in_backward() -> None:
    """Each parameter stepped as soon as its gradient is there, by a hook."""

    def step(p: Any) -> None:
        p.optimizer.step()
        p.optimizer.zero_grad()

    plain, model = twins(Mlp())
    for each in (plain, model):
        for p in each.parameters():
            p.optimizer = torch.optim.SGD([p], lr=0.1)  # type: ignore[attr-defined]
            p.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            loss_of(each).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert distance(p, q) <= FLOAT16


@pytest.mark.parametrize("wrt", ["input", "parameters"])
def test_batched_gradients(wrt: str) -> None:
    found = []
    for model in twins(Mlp(), scaled(2.0**10)):  # times 2^16 a gradient of 1 would overflow
        x = X[:2].clone().requires_grad_()
        inputs = [x] if wrt == "input" else list(model.parameters())
        rows = torch.eye(4).view(4, 2, 2)
        found.append(torch.autograd.grad(model(x), inputs, rows, is_grads_batched=True))
    assert_close(found[1], found[0])


def test_jacobian_by_reverse_mode() -> None:
    found = [
        torch.autograd.functional.jacobian(lambda x, m=m: m(x).sum(0), X)
        for m in twins(Mlp(), scaled(2.0**10))
    ]
    assert distance(found[1], found[0]) <= FLOAT16


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("around", ["the model", "a part of it"])
def test_gradient_checkpointing(reentrant: bool, around: str) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.tail = Mlp(outputs=4), Mlp()

        def forward(self, x: Tensor) -> Tensor:
            if around == "a part of it":
                x = checkpoint(self.head, x, use_reentrant=reentrant)
            else:
                x = self.head(x)
            return self.tail(x)

    plain, model = twins(Parts())
    for each in (plain, model):
        x = X.clone().requires_grad_()
        whole = around == "the model"
        out = checkpoint(each, x, use_reentrant=reentrant) if whole else each(x)
        (out - Y).square().mean().mul(1e-5).backward()
        each.x = x.grad
    assert_same_gradients(model, plain)
    assert distance(model.x, plain.x) <= FLOAT16


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_scale_moves_under_checkpointing(reentrant: bool) -> None:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp_graph.convert(model, optimizer, policy=scaled(2.0**10, growth_interval=2))
    x, scales = X.clone().requires_grad_(), []
    for overflows in (True, True, True, False, False, False):
        model.zero_grad()
        checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
        if overflows:
            overflow(model)
        assert optimizer.step() is not overflows
        scales.append(amp_graph.scale_of(model).get_scale())
    assert scales == [2.0**9, 2.0**8, 2.0**7, 2.0**7, 2.0**8, 2.0**8]


def test_a_converted_part_of_a_plain_model() -> None:
    whole = nn.Sequential(Mlp(outputs=4), nn.Tanh(), Mlp())
    plain = copy.deepcopy(whole)
    amp_graph.convert(whole[2], policy="float16")
    for each in (plain, whole):
        (loss_of(each) * 1e-6).backward()
    assert_same_gradients(whole, plain)


def test_a_converted_model_inside_a_converted_model() -> None:
    whole = nn.Sequential(Mlp(outputs=4), nn.Tanh(), Mlp())
    plain = copy.deepcopy(whole)
    amp_graph.convert(whole[2], policy="float16")
    amp_graph.convert(whole, policy="float16")
    for each in (plain, whole):
        (loss_of(each) * 1e-6).backward()
    assert_same_gradients(whole, plain)


def test_bfloat16_gradients() -> None:
    plain, model = twins(Mlp(), "bfloat16")
    for each in (plain, model):
        loss_of(each).backward()
    assert_same_gradients(model, plain, within=8 * FLOAT16)  # 8 bits instead of 11


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_and_saved_tensor_hooks() -> None:
    plain, model = twins(Mlp())
    for each in (plain, model):
        with torch.autograd.set_detect_anomaly(True), torch.autograd.graph.save_on_cpu():
            loss_of(each).backward()
    assert_same_gradients(model, plain)
