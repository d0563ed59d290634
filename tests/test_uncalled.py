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


FEW = "was called with gradients enabled for few of 64 steps"


def said_of(recwarn, words: str) -> list[str]:
    return [str(w.message) for w in recwarn.list if words in str(w.message)]


def test_one_that_was_called_but_is_trained_by_something_else_is_told_of_once(recwarn):
    model = amp_graph.convert(Coder(), policy="bfloat16")
    train(model, model, steps=2)
    train(model, model.forward, steps=63)
    assert not said_of(recwarn, "is trained")
    train(model, model.forward, steps=256)
    (said,) = said_of(recwarn, "is trained, but")
    assert FEW in said


@pytest.mark.parametrize(
    "way",
    [
        lambda model, whole: whole,
        lambda model, whole: nn.Sequential(nn.Identity(), model),
        lambda model, whole: lambda x: model.decode(x[:, :2]),
        lambda model, whole: copy.deepcopy(model),
        lambda model, whole: torch.compile(lambda x: model(x), backend="eager"),
    ],
    ids=["inside", "in a container", "method", "copies", "compiled"],
)
def test_one_whose_calls_are_another_s_is_not(way, recwarn):
    model = Coder()
    whole = amp_graph.convert(nn.Sequential(nn.Linear(4, 4), model), policy="bfloat16")
    amp_graph.convert(model, policy="bfloat16", methods=("decode",))
    train(model, model, steps=1)
    run, optimizer = way(model, whole), torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(130):
        optimizer.zero_grad()
        loss = run(torch.randn(3, 4)).square().mean()
        loss.backward()
        for parameter in model.parameters():  # of a copy it has none
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert not said_of(recwarn, "is trained")


def test_one_of_many_heads_under_one_optimizer_is_not(recwarn):
    heads = [amp_graph.convert(Coder(), policy="bfloat16") for _ in range(20)]
    optimizer = torch.optim.SGD([p for head in heads for p in head.parameters()], 0.01)
    for step in range(150):
        optimizer.zero_grad()
        heads[step % 20](torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
    assert not said_of(recwarn, "with gradients enabled for few")


class Forward(nn.Linear):
    """Of a class of its own: models of one name are told of once."""

    def __init__(self) -> None:
        super().__init__(4, 4)


def test_a_model_of_a_script_that_was_trained_before_its_first_call_is_told_of(start, capsys):
    start()
    models = [Forward(), Forward()]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        for _ in range(3):
            model.forward(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
    for model in models:
        with torch.no_grad():
            model(torch.randn(3, 4))
    assert capsys.readouterr().err.count("is trained, but had not been called before") == 1


def test_those_of_a_script_that_others_answer_for_are_not(start, capsys):
    """A part that is called alone once the whole was trained, and one under a scaler."""
    start()
    model, scaled = Coder(), nn.Sequential(nn.Linear(4, 4))
    train(model, model, steps=3)
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(scaled.parameters(), 0.01)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(scaled(torch.randn(3, 4)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad():
        for part in (model.encoder, nn.Sequential(model.encoder), *scaled, scaled):
            for _ in range(5):
                part(torch.randn(3, 4))
    assert "is trained, but" not in capsys.readouterr().err


def test_one_that_is_called_late_though_its_optimizer_steps_others_is_not(start, capsys):
    start()
    first, late = nn.Linear(4, 4), Forward()
    optimizer = torch.optim.SGD([*first.parameters(), *late.parameters()], 0.01)
    for step in range(6):
        optimizer.zero_grad()
        hidden = first(torch.randn(3, 4))
        (late(hidden) if step > 3 else hidden).square().mean().backward()
        optimizer.step()
    assert "is trained, but" not in capsys.readouterr().err
