"""Parts that a module's constructor calls, to see what sizes come of them, are no models yet."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import amp_graph


class Sized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())
        self.tried = self.body(torch.ones(1, 1, 8, 8))
        self.head = nn.Linear(self.tried.shape[1], 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def test_a_model_that_tries_its_parts_in_its_constructor_is_converted_as_a_whole(start):
    installation, model = start(), Sized()
    assert not installation.models.seen
    model(torch.randn(2, 1, 8, 8))
    assert [m.name for m in installation.models.seen] == ["Sized"]
    assert amp_graph.is_converted(model) and not amp_graph.is_converted(model.body)


class Pretrained(Sized):
    """As in deep clustering, whose autoencoder is trained before the rest is there."""

    def __init__(self) -> None:
        super().__init__()
        for _ in range(5):
            self.body(torch.ones(1, 1, 8, 8)).sum().backward()


def test_a_part_that_is_trained_in_a_constructor_is_converted(start):
    installation, model = start(), Pretrained()
    assert amp_graph.is_converted(model.body)
    model(torch.randn(2, 1, 8, 8))
    assert [m.name for m in installation.models.seen][-1] == "Pretrained"
    assert amp_graph.is_converted(model) and not amp_graph.is_converted(model.body)


class Layer(nn.Module):
    """As of Keras: it computes with a stand-in for its weight where it is asked for sizes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8))

    def forward(self, x):
        return x @ (torch.empty_like(self.weight, device="meta") if x.is_meta else self.weight).T


def test_a_call_that_asks_what_sizes_come_of_it_decides_nothing(start):
    installation, model = start(), Layer()
    assert model(x=torch.ones(5, 8, device="meta")).shape == (5, 3)
    assert not installation.models.seen
    model(torch.randn(5, 8))
    (seen,) = installation.models.seen
    assert [*seen.record.runs.values()] == [1]
    assert "matmul" in seen.record.plans[0].low


class Tracking(nn.Module):
    """As of Keras: what it has for weights becomes parameters where somebody asks for them, and is
    a stand-in while it is asked for sizes."""

    def __init__(self):
        super().__init__()
        self.variable = torch.randn(3, 8)
        self.value = self.variable

    def named_parameters(self, *args, **kwargs):
        if not hasattr(self, "weight"):
            self.weight = nn.Parameter(self.value)
        return super().named_parameters(*args, **kwargs)

    def forward(self, x):
        return x @ self.value.T

    def ask(self, x):
        self.value = torch.empty_like(self.variable, device="meta")
        try:
            return self(x.to("meta")).shape
        finally:
            self.value = self.variable


def test_a_call_that_asks_for_sizes_makes_no_parameters(start):
    installation, model = start(), Tracking()
    assert model.ask(torch.ones(5, 8)) == (5, 3)
    assert not model._parameters and not installation.models.seen
    model(torch.randn(5, 8))
    assert model.weight.device.type == "cpu" and amp_graph.is_converted(model)


class KerasTensor:
    """By what is called so Keras asks for sizes while a model is put together."""

    shape, dtype = (5, 8), "float32"


def test_neither_does_one_on_a_description(start, capsys):
    class Described(Layer):
        def forward(self, x):
            return super().forward(torch.ones(x.shape)) if isinstance(x, KerasTensor) else x

    installation, model = start(), Described()
    assert model(KerasTensor()).shape == (5, 3)
    assert not installation.models.seen and not capsys.readouterr().err
