"""Backward passes and steps of compiled graphs, which scale their gradients inside."""

from __future__ import annotations

import threading

import pytest
import torch
from compiled import compiled, count
from counting import Names
from several_threads import gone_wrong_beside_one_another
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint
from training import FLOAT16, Mlp, X, assert_same_gradients, distance, same, snapshot, twins

import amp_graph
from amp_graph import LossScale
from amp_graph.boundary.inner_scaling import ENTER

CHECK = "_amp_foreach_non_finite_check_and_unscale_"

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo", "no_other_scales"),
    pytest.mark.filterwarnings("error::amp_graph.ConversionWarning"),
]


def test_a_gradscaler_of_the_user_s_has_the_model_unscaled(graphs) -> None:
    plain, model = twins(Mlp())
    compiled(amp_graph.restore(model))
    optimizer = SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(X).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    plain(X).square().mean().backward()
    assert_same_gradients(model, plain)
    assert count(graphs, ENTER)


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_value_, nn.utils.clip_grad_norm_, None])
def test_an_overflow_inside_skips_the_step_though_gradients_were_clipped(clip, graphs) -> None:
    model = compiled(Mlp())
    optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
    for factor, steps in ((1.0, True), (2.0**20, False), (1.0, True)):
        before = snapshot(model)
        optimizer.zero_grad()
        (model(X) * factor).mean().backward()
        if clip is not None:
            clip(model.parameters(), 1.0)
        optimizer.step()
        assert same(snapshot(model), before) is not steps
    assert count(graphs, ENTER)


@pytest.mark.parametrize("passes", [1, 3])
def test_gradients_are_looked_at_once_for_each_backward_pass(passes, graphs) -> None:
    model = compiled(Mlp())
    optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(3):
        optimizer.zero_grad()
        with Names() as names:
            for _ in range(passes):
                model(X).square().mean().backward()
            optimizer.step()
    assert names.names.count(CHECK) == passes
    assert amp_graph.step_counts(optimizer).stepped == 3


@pytest.mark.parametrize("wanted", ["inputs", "all"])
def test_selected_gradients_are_true_and_looked_at_by_the_step(wanted, graphs) -> None:
    plain, model = twins(Mlp())
    compiled(amp_graph.restore(model))
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.step()
    for each in (plain, model):
        weights = [each.first.weight] if wanted == "inputs" else [*each.parameters()]
        each(X).square().mean().backward(inputs=weights)
    assert_same_gradients(model, plain)
    model.first.weight.grad.fill_(torch.inf)
    before = snapshot(model)
    optimizer.step()
    assert same(snapshot(model), before)


@pytest.mark.parametrize("has_optimizer", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_model(reentrant, has_optimizer, graphs) -> None:
    plain, model = twins(Mlp())
    compiled(amp_graph.restore(model))
    if has_optimizer:
        SGD(model.parameters(), lr=0.0).step()
    inputs = [X.clone().requires_grad_() for _ in range(2)]
    for each, x in zip((plain, model), inputs, strict=True):
        (checkpoint(each, x, use_reentrant=reentrant).square().mean() * 2.0**-18).backward()
    assert_same_gradients(model, plain)
    assert distance(inputs[1].grad, inputs[0].grad) <= FLOAT16


def test_gradients_of_inputs_are_finite_beside_training(graphs) -> None:
    """1 comes in, which times the scale of training is no float16."""
    plain, model = twins(Mlp())
    compiled(amp_graph.restore(model))
    optimizer = SGD(model.parameters(), lr=0.0)
    model(X).square().mean().backward()
    optimizer.step()
    inputs = [X.clone().requires_grad_() for _ in range(2)]
    for each, x in zip((plain, model), inputs, strict=True):
        each(x)[:, 0].sum().backward()
    assert distance(inputs[1].grad, inputs[0].grad) <= FLOAT16


def test_a_checkpoint_whose_backward_pass_another_thread_runs(graphs) -> None:
    """In it the graph is run again, as it is in the threads of devices."""
    plain, model = twins(Mlp())
    compiled(amp_graph.restore(model))
    for each in (plain, model):
        loss = checkpoint(each, X, use_reentrant=False).square().mean() * 2.0**-18
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert_same_gradients(model, plain)


def test_threads_whose_passes_choose_their_own_scales(graphs) -> None:
    """No optimizer is known."""
    plain, model = twins(Mlp())
    compiled(amp_graph.restore(model))
    model(X)
    assert not gone_wrong_beside_one_another(plain, model)


class Broken(nn.Module):
    """Of two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.second(h)


@pytest.mark.filterwarnings("default::amp_graph.ConversionWarning")
def test_a_model_of_two_graphs(graphs) -> None:
    plain, model = twins(Broken())
    compiled(amp_graph.restore(model))
    optimizer = SGD(model.parameters(), lr=0.1)
    for each in (plain, model):
        each(X).square().mean().backward()
    assert_same_gradients(model, plain)
    assert len(graphs) == 2 and count(graphs, ENTER) == 5
    optimizer.step()
    optimizer.zero_grad()
    before = snapshot(model)
    (model(X) * 2.0**20).mean().backward()
    optimizer.step()
    assert same(snapshot(model), before)
    assert amp_graph.step_counts(optimizer).skipped == 1


def test_the_abort_names_the_operator(graphs) -> None:
    model = compiled(Mlp(), loss_scale=LossScale(abort_after=3))
    optimizer = SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(20):
            optimizer.zero_grad()
            (model(X) * 2.0**100).sum().backward()
            optimizer.step()

    with pytest.raises(amp_graph.OverflowAbort, match=r"gave for aten\.linear\.default in module"):
        train()
