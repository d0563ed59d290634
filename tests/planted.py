"""Models with a fault of which the place is known."""

from __future__ import annotations

import torch
from torch import nn


class FourLayers(nn.Module):
    """What `fault` names goes wrong between the second and the third."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.go_wrong(self.layers[1](torch.relu(self.layers[0](x))))
        return self.layers[3](torch.relu(self.layers[2](x)))

    def go_wrong(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Planted(FourLayers):
    """One does what float16 cannot."""

    def go_wrong(self, x: torch.Tensor) -> torch.Tensor:
        if self.fault == "overflow":
            x = x * 6e4
            x = x * 1e-4
        if self.fault == "underflow":
            x = x * 1e-4 * 1e-4
            x = x * 6e4
        if self.fault == "nan":
            x = (x * 3e4 - x * 2e4) * 1e-4
        if self.fault == "overflow in place":
            x = x + 6e4
            x.mul_(2)
        if self.fault == "slope":
            x = x * 1e-3
            x = x * 1e3
        if self.fault == "slope of one reader":
            x = x * 1e-3
            first, last = x.split(4, -1)
            x = torch.cat([first * 1e3 + first, last], -1)
        if self.fault == "gradient of a weight":
            x = x * 0 + 1e4
        return x


def inputs() -> torch.Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(1)) * 20
