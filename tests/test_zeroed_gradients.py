"""Gradients that are set to zero where they are, and not to None, between rounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW
from training import Mlp, X, scaled

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize(("kind", "options"), [(SGD, {}), (AdamW, {"fused": True})])
def test_an_overflow_is_over_with_its_round(kind: Any, options: Any) -> None:
    """The memory of what was not finite has other numbers in it by the next step."""
    model = Mlp()
    optimizer = kind(model.parameters(), lr=0.01, **options)
    amp_graph.convert(model, optimizer, policy=scaled(2.0**10))
    went_on = []
    for factor in (1, math.inf, 1, 1, math.inf, 1):
        optimizer.zero_grad(set_to_none=False)
        (model(X) * factor).sum().backward()
        went_on.append(bool(optimizer.step()))
    assert went_on == [True, False, True, True, False, True]
    assert amp_graph.scale_of(model).get_scale() == 2.0**8


def test_gradients_may_be_zeros_from_the_first_step_on() -> None:
    model = Mlp()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer = SGD(model.parameters(), lr=0.01)
    amp_graph.convert(model, optimizer, policy=scaled(2.0**10))
    for factor in (math.inf, 1):
        optimizer.zero_grad(set_to_none=False)
        (model(X) * factor).sum().backward()
        assert bool(optimizer.step()) is (factor == 1)
