"""The tasks of parity.py: models, data, training loops and metrics.

A loop is the same in every precision but for the call of `convert`, which does nothing in float32.
The loop that is run in float16 also works under the GradScaler that `convert` returns, which is
enabled only beside `torch.autocast`.
"""

from __future__ import annotations

import argparse  # its source is one of the texts
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import amp_graph

BATCH, LENGTH, CANVAS = 32, 24, 14
Convert = Callable[[nn.Module, Optimizer], torch.amp.GradScaler]


@dataclass(frozen=True)
class Task:
    """train: (convert, steps) -> final metric; the random state is the seed's."""

    train: Callable[[Convert, int], float]
    steps: int
    metric: str
    dtypes: tuple[str, ...]


@functools.cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (n, 1, 8, 8) in 0..1 and labels to train on; the same to test on."""
    found = load_digits()
    x = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(found.target)
    order = torch.randperm(len(y), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    x, y = x[order], y[order]
    return x[:1400], y[:1400], x[1400:], y[1400:]


@functools.cache
def text() -> tuple[Tensor, Tensor, int]:
    """Characters of some of the standard library's modules: to train on, to test on, how many."""
    names = ("abc", "argparse", "bisect", "calendar", "dataclasses", "fractions", "heapq", "json")
    folder = Path(argparse.__file__).parent
    paths = [p for n in names for p in (folder / f"{n}.py", folder / n / "decoder.py")]
    source = "".join(p.read_text() for p in paths if p.exists()).lower()
    alphabet = {c: i for i, c in enumerate(sorted(set(source)))}
    codes = torch.tensor([alphabet[c] for c in source])
    return codes[:-20_000], codes[-20_000:], len(alphabet)


def chunks(codes: Tensor, count: int) -> Tensor:
    """(count, LENGTH + 1) characters from places at random."""
    starts = torch.randint(len(codes) - LENGTH - 1, (count,))
    return codes[starts[:, None] + torch.arange(LENGTH + 1)]


def evaluated(model: nn.Module) -> nn.Module:
    """The model in float32 and in eval mode."""
    if amp_graph.is_converted(model):
        amp_graph.restore(model)
    vars(model).pop("forward", None)  # that under autocast
    return model.eval()


def train_convnet(convert: Convert, steps: int) -> float:
    x, y, test_x, test_y = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = OneCycleLR(optimizer, 0.1, total_steps=steps)
    convert(model, optimizer)
    for _ in range(steps):
        i = torch.randint(len(y), (BATCH,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[i]), y[i]).backward()
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        return float(F.cross_entropy(evaluated(model)(test_x), test_y))


class Lstm(nn.Module):
    def __init__(self, alphabet: int, width: int = 48):
        super().__init__()
        self.table = nn.Embedding(alphabet, 16)
        self.lstm = nn.LSTM(16, width, batch_first=True)
        self.head = nn.Linear(width, alphabet)

    def forward(self, codes: Tensor) -> Tensor:
        return self.head(self.lstm(self.table(codes))[0])


class Transformer(nn.Module):
    def __init__(self, alphabet: int, width: int = 32, depth: int = 2):
        super().__init__()
        self.table = nn.Embedding(alphabet, width)
        self.places = nn.Parameter(torch.randn(LENGTH, width) * 0.1)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 64, 0.0, F.gelu, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, alphabet)

    def forward(self, codes: Tensor) -> Tensor:
        h = self.table(codes) + self.places
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        for block in self.blocks:
            h = block(h, src_mask=mask, is_causal=True)
        return self.head(self.norm(h))


def train_reader(
    make: Callable[[int], nn.Module], convert: Convert, steps: int, rate: float = 0.01
) -> float:
    """Nats per character of text held out."""
    train, test, alphabet = text()
    model = make(alphabet)
    optimizer = AdamW(model.parameters(), lr=rate)
    scheduler = OneCycleLR(optimizer, rate, total_steps=steps)
    convert(model, optimizer)

    def loss_of(codes: Tensor) -> Tensor:
        return F.cross_entropy(model(codes[:, :-1]).flatten(0, 1), codes[:, 1:].flatten())

    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(chunks(train, BATCH // 2)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    evaluated(model)
    with torch.no_grad():
        return float(loss_of(chunks(test, 400)))


def train_gan(convert: Convert, steps: int) -> float:
    """Squared distance between the pixels' means and deviations, real against generated."""
    x = digits()[0].flatten(1)

    def layers(*widths: int) -> nn.Module:
        pairs = itertools.pairwise(widths)
        return nn.Sequential(*(m for a, b in pairs for m in (nn.Linear(a, b), nn.LeakyReLU(0.2))))

    generator = nn.Sequential(layers(16, 64, 64), nn.Linear(64, 64), nn.Sigmoid())
    critic = nn.Sequential(layers(64, 64, 64), nn.Linear(64, 1))
    steppers = [Adam(m.parameters(), lr=2e-3, betas=(0.5, 0.99)) for m in (generator, critic)]
    scalers = [convert(m, o) for m, o in zip((generator, critic), steppers, strict=True)]
    for _ in range(steps):
        real, fake = x[torch.randint(len(x), (BATCH,))], generator(torch.randn(BATCH, 16))
        steppers[1].zero_grad()
        scalers[1].scale(F.softplus(-critic(real)).mean()).backward()
        scalers[1].scale(F.softplus(critic(fake.detach())).mean()).backward()
        between = ((real + fake) / 2).detach().requires_grad_()
        total = scalers[1].scale(critic(between).sum())
        (slope,) = torch.autograd.grad(total, between, create_graph=True)
        slope = slope / scalers[1].get_scale()
        scalers[1].scale(0.1 * slope.square().sum(1).mean()).backward()
        scalers[1].step(steppers[1])
        scalers[1].update()
        steppers[0].zero_grad()
        scalers[0].scale(F.softplus(-critic(fake)).mean()).backward()
        scalers[0].step(steppers[0])
        scalers[0].update()
    with torch.no_grad():
        made = evaluated(generator)(torch.randn(2000, 16))
    gaps = made.mean(0) - x.mean(0), made.std(0) - x.std(0)
    return float(sum(gap.square().sum() for gap in gaps))


class Detector(nn.Module):
    """Where a digit is, how sure it is that there is one, and which."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 12, 3, stride=2, padding=1), nn.GroupNorm(3, 12), nn.SiLU(),
            nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.GroupNorm(3, 24), nn.SiLU(),
            nn.Flatten(), nn.Linear(24 * 16, 48), nn.SiLU(),
        )  # fmt: skip
        self.box, self.kind = nn.Linear(48, 2), nn.Linear(48, 10)
        self.there = nn.Linear(48, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.trunk(x)
        return {"box": self.box(h), "kind": self.kind(h), "there": self.there(h)[:, 0]}


def scenes(x: Tensor, y: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Canvases, most with a digit somewhere: image, place in 0..1, label, whether there is one."""
    i, place = torch.randint(len(y), (count,)), torch.randint(CANVAS - 7, (count, 2))
    there = torch.rand(count) < 0.8
    canvas = torch.rand(count, 1, CANVAS, CANVAS) * 0.1
    for n in there.nonzero()[:, 0].tolist():
        top, left = place[n].tolist()
        canvas[n, :, top : top + 8, left : left + 8] += x[i[n]]
    return canvas, place / (CANVAS - 8), y[i], there


def train_detector(convert: Convert, steps: int) -> float:
    """The three losses together, on digits held out."""
    x, y, test_x, test_y = digits()
    model = Detector()
    optimizer = AdamW(model.parameters(), lr=0.005, weight_decay=1e-2)
    scheduler = OneCycleLR(optimizer, 0.005, total_steps=steps)
    convert(model, optimizer)

    def losses(x: Tensor, y: Tensor, count: int) -> Iterator[Tensor]:
        image, place, kind, there = scenes(x, y, count)
        out = model(image)
        yield F.binary_cross_entropy_with_logits(out["there"], there.float())
        yield F.smooth_l1_loss(out["box"][there], place[there]) * 10
        yield F.cross_entropy(out["kind"][there], kind[there])

    for _ in range(steps):
        optimizer.zero_grad()
        *first, last = losses(x, y, BATCH)
        for loss in first:
            loss.backward(retain_graph=True)
        last.backward()
        optimizer.step()
        scheduler.step()
    evaluated(model)
    with torch.no_grad():
        return float(sum(losses(test_x, test_y, 600)))


TASKS = {
    "convnet": Task(train_convnet, 1500, "cross entropy", ("bfloat16",)),
    "lstm": Task(functools.partial(train_reader, Lstm), 3000, "nats per character", ("bfloat16",)),
    "transformer": Task(
        functools.partial(train_reader, Transformer), 3000, "nats per character", ("bfloat16",)
    ),
    "deep transformer": Task(
        functools.partial(train_reader, functools.partial(Transformer, depth=12), rate=0.004),
        1000,
        "nats per character",
        ("bfloat16",),
    ),
    "gan": Task(train_gan, 3000, "distance of moments", ("bfloat16", "float16")),
    "detector": Task(train_detector, 2000, "sum of losses", ("bfloat16",)),
}
