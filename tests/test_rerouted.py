"""A step of training that enters a wrapper by way of the model's `forward`, as under Lightning."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amp_graph

STEPS = 4


class Trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        return self.layer(x)

    def by_call(self, x):
        return self(x).square().mean()

    def by_part(self, x):
        return self.layer(x).square().mean()


def rerouted(model, method):
    """Calls of `method` that a wrapper sees, as `lightning.pytorch.strategies` makes them."""
    wrapper = nn.DataParallel(model)

    def call(x):
        forward = model.forward

        def in_its_place(*args):
            model.forward = forward
            return getattr(model, method)(*args)

        model.forward = in_its_place
        return wrapper(x)

    return call


def train(step) -> torch.Tensor:
    for _ in range(STEPS):
        loss = step(torch.ones(2, 8))
        loss.backward()
    return loss


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_call_inside_of_the_step_is_what_is_captured(dtype):
    model = amp_graph.convert(Trained(), policy=dtype)
    train(rerouted(model, "by_call"))
    (plan,) = amp_graph.plans(model)
    assert [*plan.low] == ["linear"]


@pytest.mark.parametrize(("method", "name"), [("by_call", "Trained"), ("by_part", "Linear")])
@pytest.mark.parametrize("is_validated", [False, True])
def test_of_a_script_what_the_step_calls_is_converted(start, method, name, is_validated):
    installation, model = start(), Trained()
    if is_validated:
        with torch.no_grad():
            model(torch.ones(2, 8))
    train(rerouted(model, method))
    seen = {m.name: m.record for m in installation.models.seen}
    assert {*seen} == {name} | ({"Trained"} if is_validated else set())
    assert STEPS in seen[name].runs.values() and not any(p.fallback for p in seen[name].plans)
