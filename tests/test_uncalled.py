"""Converted models that are trained without being called, which are told of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Coder(nn.Module):
    """A model that may be trained by its methods."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 2), nn.Linear(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encoder(x))

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(x)


def train(model: nn.Module, run: Any, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        run(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "way",
    [
        lambda model: model.forward,
        lambda model: lambda x: model.decode(model.encoder(x)),
    ],
    ids=["forward", "parts"],
)
@pytest.mark.parametrize("is_validated", [False, True])
def test_a_model_that_is_trained_without_a_call_is_told_of_once(way, dtype, is_validated, recwarn):
    model = amp_graph.convert(Coder(), policy=dtype)
    if is_validated:
        with torch.no_grad():
            model(torch.ones(1, 4))
        recwarn.clear()  # of a CPU that emulates
    train(model, way(model), steps=1)
    assert not recwarn.list
    train(model, way(model), steps=3)
    (warning,) = recwarn.list
    assert "Coder is trained, but has not been called" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize(
    "prepare",
    [
        lambda model: model(torch.ones(1, 4)),
        lambda model: model._replicate_for_data_parallel(),
        amp_graph.restore,
    ],
    ids=["called", "copied by DataParallel", "restored"],
)
def test_a_model_that_was_called_or_restored_is_not_told_of(prepare, recwarn):
    model = amp_graph.convert(Coder(), policy="bfloat16")
    prepare(model)
    train(model, model.forward, steps=3)
    assert not [w for w in recwarn.list if "has not been called" in str(w.message)]


def test_nor_is_one_that_was_restored_of_which_a_method_is_held(recwarn):
    model = amp_graph.convert(Coder(), policy="bfloat16", methods=("decode",))
    held = model.decode
    amp_graph.restore(model)
    train(model, model.forward, steps=3)
    assert held.__name__ == "decode"
    assert not [w for w in recwarn.list if "has not been called" in str(w.message)]


def test_a_model_that_is_trained_by_torch_func_alone_is_told_of(recwarn):
    model, x = amp_graph.convert(Coder(), policy="bfloat16"), torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    for _ in range(3):
        found = torch.func.grad(loss)({n: p.detach() for n, p in model.named_parameters()})
        for name, parameter in model.named_parameters():
            parameter.grad = found[name]
        optimizer.step()
    (warning,) = recwarn.list
    assert "Coder is trained, but has not been called" in str(warning.message)


def test_a_model_whose_parameters_are_not_stepped_is_not_told_of(recwarn):
    model, other = amp_graph.convert(Coder()), nn.Linear(4, 4)
    train(other, lambda x: model.forward(other(x)), steps=3)
    assert not recwarn.list


def test_a_model_that_plays_with_the_parameters_of_one_that_is_trained_is_not_told_of(recwarn):
    player, trained = Coder(), Coder()
    player.encoder = trained.encoder
    for model in (player, trained):
        amp_graph.convert(model, policy="bfloat16")
    with torch.no_grad():
        player(torch.ones(1, 4))
    train(trained, trained, steps=3)
    assert not [w for w in recwarn.list if "has not been called" in str(w.message)]


def told(recwarn: pytest.WarningsRecorder) -> list[str]:
    """The models that were."""
    said = [str(w.message) for w in recwarn.list]
    return [words.split()[0] for words in said if "has not been called" in words]


def test_of_parts_that_are_converted_each_answers_for_itself(recwarn):
    model = Coder()
    for module in (model.encoder, model):
        amp_graph.convert(module, policy="bfloat16")
    train(model.encoder, model.encoder.forward, steps=3)
    assert told(recwarn) == ["Linear"]
    train(model, model.forward, steps=3)
    assert told(recwarn) == ["Linear", "Coder"], "of its other parameters"


def test_an_optimizer_may_come_to_step_it_later(recwarn):
    model, other = amp_graph.convert(Coder(), policy="bfloat16"), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    for step in range(3):
        model.forward(other(torch.randn(3, 4))).sum().backward()
        optimizer.step()
        if step == 0:
            optimizer.add_param_group({"params": [*model.parameters()]})
    assert told(recwarn) == ["Coder"]


def adapted(model: nn.Module) -> nn.Module:
    """A copy of a copy, which is gone by the time that this one is called."""
    return copy.deepcopy(copy.deepcopy(model))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("copied", [copy.deepcopy, adapted])
def test_a_model_that_gets_the_gradients_of_its_copies_is_not_told_of(
    recwarn: pytest.WarningsRecorder, copied: Callable[[nn.Module], nn.Module], dtype: str
) -> None:
    """First-order MAML, federated SGD: workers are trained, and the model is validated."""
    model = amp_graph.convert(Coder(), policy=dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        with torch.no_grad():
            model(torch.ones(1, 4))
        worker = copied(model)
        worker(torch.randn(3, 4)).square().mean().backward()
        for own, theirs in zip(model.parameters(), worker.parameters(), strict=True):
            own.grad = theirs.grad
        del worker
        optimizer.step()
    assert told(recwarn) == []


def test_a_model_beside_a_copy_that_keeps_averages_is_told_of(
    recwarn: pytest.WarningsRecorder,
) -> None:
    model = amp_graph.convert(Coder(), policy="bfloat16")
    averages = copy.deepcopy(model)
    with torch.no_grad():
        averages(torch.ones(1, 4))
    train(model, model.forward, steps=3)
    assert told(recwarn) == ["Coder"]


def test_a_copy_of_a_model_that_was_called_is_told_of(recwarn: pytest.WarningsRecorder) -> None:
    model = amp_graph.convert(Coder(), policy="bfloat16")
    model(torch.ones(1, 4))
    copied = copy.deepcopy(model)
    train(copied, copied.forward, steps=3)
    assert told(recwarn) == ["Coder"]
