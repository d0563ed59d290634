"""The other models: an MLP, a recommender, and a flow that makes sound."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from bench_models.workload import Workload


def mlp(device: str, large: bool) -> Workload:
    batch, width, depth = (4096, 4096, 8) if large else (256, 1024, 4)
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())]
    x = torch.randn(batch, width, device=device)
    y = torch.randint(0, 10, (batch,), device=device)
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    return Workload(model, lambda m: F.cross_entropy(m(x), y))


class NCF(nn.Module):
    """Neural collaborative filtering (He et al. 2017): embeddings and an MLP; `factors` adds the
    product of a second pair of embeddings."""

    def __init__(self, users: int, items: int, width: int, layers: tuple[int, ...], factors: int):
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        sizes = zip((2 * width, *layers), layers, strict=False)
        rated = [m for a, b in sizes for m in (nn.Linear(a, b), nn.ReLU())]
        self.rate, self.last = nn.Sequential(*rated), nn.Linear(layers[-1] + factors, 1)
        self.factors = nn.ModuleList(nn.Embedding(n, factors) for n in (users, items) if factors)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        x = self.rate(torch.cat([self.users(user), self.items(item)], 1))
        if self.factors:
            x = torch.cat([x, self.factors[0](user) * self.factors[1](item)], 1)
        return self.last(x).squeeze(1)


def ncf(device: str, large: bool) -> Workload:
    if large:  # MovieLens 20M
        users, items, batch = 138_493, 26_744, 2**20
        model = NCF(users, items, 128, (256, 256, 128, 64), 64)
    else:
        users, items, batch = 5000, 5000, 1024
        model = NCF(users, items, 64, (128, 256, 128), 0)
    user = torch.randint(0, users, (batch,), device=device)
    item = torch.randint(0, items, (batch,), device=device)
    likes = torch.rand(batch, device=device).round()
    return Workload(model, lambda m: F.binary_cross_entropy_with_logits(m(user, item), likes))


class Coupling(nn.Module):
    """An invertible mix of channels, and half of them scaled and shifted as a dilated network
    says from the other half and the spectrogram."""

    def __init__(self, groups: int, mels: int, width: int, depth: int):
        super().__init__()
        self.mix = nn.Parameter(torch.linalg.qr(torch.randn(groups, groups))[0])
        self.enter = nn.Conv1d(groups // 2, width, 1)
        self.condition = nn.Conv1d(mels, 2 * width * depth, 1)
        self.layers = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 3, padding=2**i, dilation=2**i) for i in range(depth)
        )
        self.skip = nn.ModuleList(
            nn.Conv1d(width, (2 if i < depth - 1 else 1) * width, 1) for i in range(depth)
        )
        self.leave = nn.Conv1d(width, groups, 1)
        nn.init.normal_(self.leave.weight, std=1e-3)  # nearly the identity at first, as published
        nn.init.zeros_(self.leave.bias)  # type: ignore[arg-type]  # there is one

    def forward(
        self, x: torch.Tensor, mel: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        log_det = torch.linalg.slogdet(self.mix.float())[1] * x.shape[0] * x.shape[2]
        kept, changed = F.conv1d(x, self.mix.unsqueeze(-1)).chunk(2, 1)
        h = self.enter(kept)
        total = torch.zeros_like(h)
        conditions = self.condition(mel).chunk(len(self.layers), 1)
        for layer, skip, condition in zip(self.layers, self.skip, conditions, strict=True):
            opened, gate = (layer(h) + condition).chunk(2, 1)
            result = skip(torch.tanh(opened) * torch.sigmoid(gate))
            if result.shape[1] > h.shape[1]:
                further, result = result.chunk(2, 1)
                h = h + further
            total = total + result
        log_scale, shift = self.leave(total).chunk(2, 1)
        return torch.cat([kept, changed * log_scale.exp() + shift], 1), log_scale, log_det


class WaveGlow(nn.Module):
    """Prenger et al. 2019, without early outputs: sound to noise, and its log-likelihood."""

    def __init__(self, flows: int, groups: int, mels: int, width: int, depth: int):
        super().__init__()
        self.flows = nn.ModuleList(Coupling(groups, mels, width, depth) for _ in range(flows))

    def forward(
        self, x: torch.Tensor, mel: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        log_scales, log_dets = [], []
        for flow in self.flows:
            x, log_scale, log_det = flow(x, mel)
            log_scales.append(log_scale)
            log_dets.append(log_det)
        return x, torch.stack(log_scales), torch.stack(log_dets)


def waveglow(device: str, large: bool) -> Workload:
    batch, flows, width, depth, length = (12, 12, 512, 8, 2000) if large else (2, 3, 32, 4, 200)
    mel = torch.randn(batch, 80, length, device=device)
    x = torch.randn(batch, 8, length, device=device)

    def loss(m: nn.Module) -> torch.Tensor:
        z, log_scales, log_dets = m(x, mel)
        return (z.square().sum() / 2 - log_scales.sum() - log_dets.sum()) / z.numel()

    return Workload(WaveGlow(flows, 8, 80, width, depth), loss)
