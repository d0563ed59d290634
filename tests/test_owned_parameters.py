"""Which parameters are a model's own: those it has, and those that its graphs read as such."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from amp_graph.gradients import owned_parameters
from amp_graph.gradients.owned_parameters import OwnedParameters


def test_those_of_the_model_and_those_that_graphs_read_are() -> None:
    model, prompt, other = nn.Linear(2, 2), Parameter(torch.ones(2)), Parameter(torch.ones(2))
    own, given = OwnedParameters(model.parameters), [prompt, model.bias, other]
    assert is_same(own.among(given), [model.bias])
    own.note([prompt])
    assert is_same(own.among(given), [prompt, model.bias])
    assert own.among([other]) == []


def test_one_in_the_place_of_another_is_not_taken_for_it() -> None:
    model = nn.Linear(2, 2)
    own, gone, value = OwnedParameters(model.parameters), Parameter(torch.ones(2)), torch.ones(2)
    own.note([gone])
    assert is_same(own.among([gone]), [gone])
    address, others = id(gone), []
    del gone
    while len(others) < 1000 and address not in map(id, others):
        others.append(Parameter(value))
    assert id(others[-1]) == address, "none was made there"
    assert own.among(others[-1:]) == []


def test_those_of_a_model_that_is_gone_are_not() -> None:
    model = nn.Linear(2, 2)
    bias, prompt = model.bias, Parameter(torch.ones(2))
    own = OwnedParameters(model.parameters)
    own.note([prompt])
    assert own.are_trained()
    del model
    assert is_same(own.among([bias, prompt]), [prompt]) and not own.are_trained()


def test_a_frozen_model_is_not_trained() -> None:
    model = nn.Linear(2, 2)
    own = OwnedParameters(model.parameters)
    model.weight.requires_grad_(False)
    assert own.are_trained()
    model.bias.requires_grad_(False)
    assert not own.are_trained()


def test_answers_are_kept_about_the_last_lists_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned_parameters, "LISTS", 2)
    model = nn.Linear(2, 2)
    own, given = OwnedParameters(model.parameters), [Parameter(torch.ones(2)) for _ in range(5)]
    for other in given:
        assert is_same(own.among([other, model.bias]), [model.bias])
        assert len(own._known) <= 2


def is_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return [*map(id, found)] == [*map(id, expected)]
