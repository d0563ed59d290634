"""Parts of a script's models that are called by themselves."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_graph

X = torch.randn(4, 8)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))


def test_a_part_that_was_called_before_the_whole_is_taken_into_it(start):
    installation, model = start(), net()
    model[0](X)
    assert amp_graph.is_converted(model[0])
    model(X)
    assert amp_graph.is_converted(model) and not amp_graph.is_converted(model[0])
    assert [m.name for m in installation.models.seen] == ["Linear", "Sequential"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parts_that_are_trained_by_themselves_after_a_call_of_the_whole_are_converted(
    start, dtype, capsys
):
    installation, model = start(DTYPE=dtype), net()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for _ in range(3):
        with torch.no_grad():
            model(X)  # validation, which comes first, as a check
        for each, part in ((model, nn.Module.__call__), (plain, lambda m, x: m.forward(x))):
            part(each[2], part(each[1], part(each[0], X))).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert [m.name for m in installation.models.seen] == ["Sequential", "Linear", "Linear"]
    records = [m.record for m in installation.models.seen]
    assert [[*record.runs.values()] for record in records] == [[3], [3], [3]]
    assert all(plan.low and not plan.fallback for r in records for plan in r.plans)
    torch.testing.assert_close(model[0].weight, plain[0].weight, rtol=0.02, atol=0.02)
    assert "is trained in float32" not in capsys.readouterr().err


def test_a_part_of_a_model_that_is_gone_is_a_model(start):
    installation, model = start(), net()
    model(X)
    head = model[2]
    del model
    with torch.no_grad():
        head(torch.ones(2, 8))
    assert amp_graph.is_converted(head)
    assert [m.name for m in installation.models.seen] == ["Sequential", "Linear"]


def test_a_part_that_a_backward_pass_calls_again_runs_as_it_did(start):
    installation, model = start(), net()

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = model

        @torch._dynamo.disable
        def forward(self, x):
            return checkpoint(self.part, x, use_reentrant=True)

    whole = Whole()
    whole(X.clone().requires_grad_()).sum().backward()
    assert [m.name for m in installation.models.seen] == ["Whole"]
    assert not amp_graph.is_converted(model)
