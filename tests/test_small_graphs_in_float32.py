"""Many small graphs in float32, beside a few that are converted, are left to Python."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from nets import low_share
from torch import Tensor, nn

import amp_graph
from amp_graph.convert import record_of

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def least(parameter: Tensor) -> float:
    found = parameter.min()
    return found.item() if found < 0 else 0.0


def log(logged: list[list[float]], module: nn.Module, given: object, result: object) -> None:
    """What loggers of training runs hook to a model: figures of all of its parameters."""
    logged.append([least(parameter.data) for parameter in module.parameters()])


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))


@pytest.mark.filterwarnings("error:.*no longer captured")
def test_a_model_whose_parameters_are_logged_stays_converted() -> None:
    plain, logged = net(), []
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    model.register_forward_hook(functools.partial(log, logged))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(8):
        expected = [min(p.min().item(), 0.0) for p in model.parameters()]
        assert low_share(model, X) == 1
        assert logged[-1] == expected
        model(X).square().mean().backward()
        optimizer.step(), optimizer.zero_grad()
    before = record_of(model).runs.total()
    model(X)
    assert record_of(model).runs.total() - before == 1
    assert any("in float32" in told for told in record_of(model).breaks)
    amp_graph.restore(model)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(plain(X), model(X))
