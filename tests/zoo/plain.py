"""Models written with plain `torch.nn`: layers and wholes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .case import Batch, Case, distance_loss, generator, seeded, tensor_batch


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 16, 3, stride=2)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        x = F.relu(self.second(x))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        y += x
        return F.relu_(y)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.block(3, 8), self.block(8, 16)])
        self.middle = self.block(16, 16)
        self.widen = nn.ModuleList(
            [nn.ConvTranspose2d(16, 16, 2, stride=2), nn.ConvTranspose2d(16, 8, 2, stride=2)]
        )
        self.up = nn.ModuleList([self.block(32, 16), self.block(16, 8)])
        self.head = nn.Conv2d(8, 2, 1)

    @staticmethod
    def block(fan_in: int, fan_out: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(fan_in, fan_out, 3, padding=1), nn.GroupNorm(4, fan_out), nn.SiLU()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for widen, block, skip in zip(self.widen, self.up, reversed(skips), strict=True):
            x = block(torch.cat([widen(x), skip], dim=1))
        return self.head(F.interpolate(x, scale_factor=2, mode="bilinear"))


class Tagger(nn.Module):
    """A recurrent network over embedded tokens."""

    def __init__(self, cell: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.rnn = cell(16, 16, **options)
        self.head = nn.Linear(16 * (1 + self.rnn.bidirectional), 7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(ids))[0])


class CellLoop(nn.Module):
    """An LSTM cell unrolled by a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0])


class GAN(nn.Module):
    """Generator and discriminator in one forward: (score of the real, score of the fake)."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(8, 16 * 4 * 4),
            nn.Unflatten(1, (16, 4, 4)),
            nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, 8, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 16, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Flatten(),
            nn.Linear(16 * 4 * 4, 1),
        )

    def forward(self, noise: torch.Tensor, real: torch.Tensor) -> dict[str, torch.Tensor]:
        fake = self.generator(noise)
        return {"real": self.discriminator(real), "fake": self.discriminator(fake)}


def gan_loss(scores: dict[str, torch.Tensor]) -> torch.Tensor:
    real, fake = scores["real"].float(), scores["fake"].float()
    return F.softplus(-real).mean() + F.softplus(fake).mean()


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.transformer = nn.Transformer(16, 4, 1, 1, 32, batch_first=True, dropout=0.0)
        self.head = nn.Linear(16, 50)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        x = self.transformer(self.embed(source), self.embed(target), tgt_mask=mask)
        return self.head(x)


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention`, its weights asked for, so that it is not one fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, weights = self.attention(x, x, x, need_weights=True)
        return self.norm(x + y), weights


class BagClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 16, mode="mean")
        self.head = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3))

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.head(self.bag(ids, offsets))


def depthwise() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1, groups=4),
        nn.Hardswish(),
        nn.Conv2d(8, 8, 1, groups=2),
        nn.InstanceNorm2d(8, affine=True),
        nn.ReLU6(),
        nn.Conv2d(8, 4, 3, dilation=2),
    )


def autoencoder() -> nn.Module:
    sizes = [32, 16, 4, 16, 32]
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ELU()]
    return nn.Sequential(*layers[:-1])


def residual() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        ResidualBlock(8),
        ResidualBlock(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def volumes() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 4, 3), nn.BatchNorm3d(4), nn.Softplus(), nn.MaxPool3d(2), nn.Conv3d(4, 4, 2)
    )


def encoder_stack() -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        16, 4, 32, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def tokens(seed: int, size: int) -> Batch:
    shape = ((3, 8), (4, 12))[size]
    return (torch.randint(0, 50, shape, generator=generator(seed)),), {}


def token_pair(seed: int, size: int) -> Batch:
    return tokens(seed, size)[0] + tokens(seed + 1000, size)[0], {}


def bag(seed: int, size: int) -> Batch:
    ids = torch.randint(0, 50, (24 + 6 * size,), generator=generator(seed))
    return (ids, torch.arange(0, 24, 4)), {}


PICTURE = tensor_batch(((4, 3, 16, 16), (3, 3, 24, 24)))
SEQUENCE = tensor_batch(((3, 8, 16), (4, 12, 16)))
Row = tuple[str, Callable[[], nn.Module], Callable[[int, int], Batch]]

ROWS: list[Row] = [
    ("linear", partial(nn.Linear, 16, 8), tensor_batch(((8, 16), (5, 16)))),
    ("autoencoder", autoencoder, tensor_batch(((8, 32), (5, 32)))),
    ("convnet", ConvNet, PICTURE),
    ("residual", residual, PICTURE),
    ("unet", UNet, PICTURE),
    ("depthwise", depthwise, tensor_batch(((4, 4, 12, 12), (2, 4, 16, 16)))),
    ("conv3d", volumes, tensor_batch(((2, 1, 8, 8, 8), (3, 1, 8, 10, 10)))),
    ("lstm", partial(Tagger, nn.LSTM, batch_first=True, num_layers=2), tokens),
    ("gru", partial(Tagger, nn.GRU, batch_first=True, bidirectional=True), tokens),
    ("rnn", partial(Tagger, nn.RNN), tokens),
    ("bare_lstm", partial(nn.LSTM, 16, 8), SEQUENCE),
    ("lstm_cell", CellLoop, tensor_batch(((3, 5, 8), (4, 7, 8)))),
    ("translator", Translator, token_pair),
    ("encoder_stack", encoder_stack, SEQUENCE),
    ("attention", SelfAttention, SEQUENCE),
    ("embedding_bag", BagClassifier, bag),
]


def cases() -> list[Case]:
    found = [
        Case(name, "torch.nn", partial(seeded, name, build), batch, distance_loss)
        for name, build, batch in ROWS
    ]
    noise_and_real = tensor_batch(((4, 8), (3, 8)), ((4, 3, 16, 16), (3, 3, 16, 16)))
    gan = Case("gan", "torch.nn", partial(seeded, "gan", GAN), noise_and_real, gan_loss)
    return [*found, gan]
