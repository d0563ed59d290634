"""Models with parameters that have no size before the first call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph import AmpGraphError
from amp_graph.batches import call_with

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X = torch.randn(4, 8)


@pytest.mark.parametrize("inputs", [(X,), {"input": X}])
def test_a_lazy_layer_as_a_model_is_captured_in_its_first_call(inputs: Any, recwarn) -> None:
    torch.manual_seed(0)
    plain = nn.LazyLinear(3)
    expected = plain(X)
    torch.manual_seed(0)
    model = amp_graph.convert(nn.LazyLinear(3), policy="bfloat16", example_inputs=inputs)
    (plan,) = amp_graph.plans(model)
    assert plan.low and plan.fallback is None
    assert type(model) is nn.Linear and torch.allclose(
        call_with(model, inputs), expected, atol=0.05
    )
    assert len(amp_graph.plans(model)) == 1 and not recwarn.list
    assert "not captured" not in str(amp_graph.explain(model))


def test_a_lazy_layer_inside_of_a_model_is_captured_in_its_first_call(recwarn) -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    amp_graph.convert(model, policy="bfloat16", example_inputs=(X,))
    model(X)
    (plan,) = amp_graph.plans(model)
    assert plan.low and plan.fallback is None and not recwarn.list


def test_random_numbers_come_after_those_that_a_lazy_layer_was_made_of() -> None:
    following = []
    for is_mixed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))
        if is_mixed:
            amp_graph.convert(model, policy="bfloat16")
        model(X)
        following.append(torch.rand(3))
    assert torch.equal(*following)


def test_a_lazy_layer_that_was_loaded_is_captured_in_its_first_call() -> None:
    model = nn.LazyLinear(3)
    model.load_state_dict(nn.Linear(8, 3).state_dict())
    amp_graph.convert(model, policy="bfloat16", example_inputs=(X,))
    model(X)
    (plan,) = amp_graph.plans(model)
    assert plan.low and plan.fallback is None


@pytest.mark.parametrize(
    "use",
    [
        lambda model: amp_graph.compare(model, X),
        lambda model: amp_graph.calibrate(model, [X], 0.1),
        lambda model: amp_graph.find_nonfinite(model, X),
        lambda model: amp_graph.export(model, (X,)),
    ],
)
@pytest.mark.parametrize("make", [lambda layer: layer, nn.Sequential])
def test_what_needs_the_parameters_asks_for_a_call_before(use: Any, make: Any) -> None:
    with pytest.raises(AmpGraphError, match=r"parameters that are not initialised.* call it once"):
        use(make(nn.LazyLinear(3)))
