"""Models that make images: U-Net, and a pair of networks that compete."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional as F

from bench_models.workload import Workload


class SmallUNet(nn.Module):
    """One level down, one up, with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, 2, 1)
        self.deep = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.SiLU())
        self.up, self.leave = nn.ConvTranspose2d(64, 32, 2, 2), nn.Conv2d(64, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = F.silu(self.enter(x))
        return self.leave(torch.cat([wide, self.up(self.deep(F.silu(self.down(wide))))], 1))


class UNet(nn.Module):
    """Ronneberger et al. 2015: four levels of 64 to 1024 channels; padded, with batch norm."""

    def __init__(self, inputs: int = 3, outputs: int = 3, width: int = 64, depth: int = 4):
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        into = [inputs, *widths[:-1]]
        self.down = nn.ModuleList(self._pair(a, b) for a, b in zip(into, widths, strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in widths[-2::-1])
        self.join = nn.ModuleList(self._pair(2 * w, w) for w in widths[-2::-1])
        self.leave = nn.Conv2d(width, outputs, 1)

    @staticmethod
    def _pair(inputs: int, outputs: int) -> nn.Sequential:
        first = nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()
        again = nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()
        return nn.Sequential(*first, *again)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for level in self.down[:-1]:
            kept.append(level(x))
            x = F.max_pool2d(kept[-1], 2)
        x = self.down[-1](x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([kept.pop(), up(x)], 1))
        return self.leave(x)


def unet(device: str, large: bool) -> Workload:
    batch, side = (16, 256) if large else (4, 64)
    x = torch.randn(batch, 3, side, side, device=device)
    return Workload(UNet() if large else SmallUNet(), lambda m: F.mse_loss(m(x), x))


class DCGAN(nn.Module):
    """Generator and discriminator (Radford et al. 2016); scores of real and made images, the
    latter with and without the generator in the graph. Both are trained in one step."""

    def __init__(self, width: int, levels: int, noise: int = 100):
        super().__init__()
        widths = [width << level for level in range(levels)]
        made: list[nn.Module] = [nn.ConvTranspose2d(noise, widths[-1], 4, 1, 0, bias=False)]
        for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True):
            made += [nn.BatchNorm2d(a), nn.ReLU(), nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False)]
        last = nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False)
        self.generator = nn.Sequential(*made, nn.BatchNorm2d(width), nn.ReLU(), last, nn.Tanh())
        judged: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
        for a, b in itertools.pairwise(widths):
            conv = nn.Conv2d(a, b, 4, 2, 1, bias=False)
            judged += [conv, nn.BatchNorm2d(b), nn.LeakyReLU(0.2)]
        self.discriminator = nn.Sequential(*judged, nn.Conv2d(widths[-1], 1, 4, bias=False))

    def forward(
        self, noise: torch.Tensor, real: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        made = self.generator(noise)
        judge = self.discriminator
        return judge(real).flatten(), judge(made.detach()).flatten(), judge(made).flatten()


def dcgan(device: str, large: bool) -> Workload:
    batch, width, levels = (256, 64, 4) if large else (16, 16, 3)
    side = 4 << levels
    noise = torch.randn(batch, 100, 1, 1, device=device)
    real = torch.randn(batch, 3, side, side, device=device).tanh()

    def loss(m: nn.Module) -> torch.Tensor:
        of_real, of_made, of_generator = m(noise, real)
        judged = F.softplus(-of_real) + F.softplus(of_made)
        return (judged + F.softplus(-of_generator)).mean()

    return Workload(DCGAN(width, levels), loss)
