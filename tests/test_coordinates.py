"""Networks of coordinates in float16, whose losses are made of first and second derivatives by
these: physics-informed ones (Raissi et al. 2019), SIREN (Sitzmann et al. 2020). What a script sees
in its loss is finite, at the first scale too.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from training import FLOAT16, distance

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

XY = torch.cartesian_prod(*2 * [torch.linspace(-1, 1, 8)])


class Waves(nn.Module):
    def __init__(self, frequency: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(2, 32), nn.Linear(32, 32), nn.Linear(32, 1)
        self.frequency = frequency
        for layer in (self.second, self.last):
            nn.init.uniform_(layer.weight, -0.4 / frequency, 0.4 / frequency)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(self.frequency * self.first(x))
        return self.last(torch.sin(self.frequency * self.second(x)))


class Derives(Waves):
    """Takes the first derivative itself."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def derivatives(model: nn.Module) -> tuple[Tensor, Tensor]:
    """The gradient, [64, 2], and the Laplacian, [64]."""
    x = XY.clone().requires_grad_()
    y = model(x)
    first = y if isinstance(model, Derives) else derivative(y.sum(), x)
    return first, sum((derivative(first[:, i].sum(), x)[:, i] for i in (0, 1)), torch.zeros(64))


def derivative(y: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(y, x, create_graph=True)[0]


@pytest.mark.parametrize("kind", [Waves, Derives])
@pytest.mark.parametrize("frequency", [0.1, 1, 10, 30])
def test_derivatives_are_finite_from_the_first_step_on(kind: type[Waves], frequency: float) -> None:
    plain = kind(frequency)
    model = copy.deepcopy(plain)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    model, optimizer = amp_graph.convert(model, optimizer, policy="float16")
    expected = derivatives(plain)
    for _ in range(3):
        found = derivatives(model)
        for given, true in zip(found, expected, strict=True):
            assert distance(given, true) <= 2 * FLOAT16
        (F.mse_loss(found[0], XY) + found[1].square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_large_loss_of_derivatives_gets_a_scale_that_it_is_finite_under() -> None:
    """The guard lowers that of the last pass; what the script sees keeps its digits."""
    model = Waves(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = amp_graph.convert(model, optimizer, policy="float16")
    losses = []
    for _ in range(40):
        first, second = derivatives(model)
        loss = 1e6 * (first.square().mean() + second.square().mean())
        loss.backward()
        losses.append(loss.item())
        if optimizer.step():
            break
        optimizer.zero_grad()
    assert len(losses) < 40 and max(losses) <= 1.01 * min(losses)
