"""What low precision costs on this CPU: single products, and whole training steps.

    python scripts/emulation.py

One thread. Prints medians of paired ratios to float32, taken in turns, and whether amp_graph takes
the precision for emulated. On a CPU that has kernels for it the last two columns are the same.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amp_graph
from amp_graph import ConversionWarning, Policy
from amp_graph.cpu import emulates

SIZES = (64, 256, 512)
TURNS = 7
WARM_UP = 2
VARIANTS = ("float32", "autocast", "native", "emulated")


def mlp() -> tuple[nn.Module, Tensor]:
    layers = nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    return nn.Sequential(*layers), torch.randn(64, 512)


def convnet() -> tuple[nn.Module, Tensor]:
    first = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()
    second = nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 256, 10)
    return nn.Sequential(*first, *second), torch.randn(16, 3, 16, 16)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(dim=1))


def encoder() -> tuple[nn.Module, Tensor]:
    return Encoder(), torch.randn(4, 64, 128)


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def product(size: int, dtype: torch.dtype) -> float:
    """The time of a matrix product over float32's."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    low = partial(torch.mm, a.to(dtype), b.to(dtype))
    low()
    return statistics.median(seconds(low) / seconds(partial(torch.mm, a, b)) for _ in range(TURNS))


def training_step(
    make: Callable[[], tuple[nn.Module, Tensor]], variant: str, dtype: torch.dtype
) -> Callable[[], None]:
    torch.manual_seed(0)
    model, x = make()
    y = torch.randint(0, 10, (len(x),))
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    if variant == "autocast":
        around = partial(torch.autocast, "cpu", dtype)
    elif variant != "float32":
        emulation = "float32" if variant == "emulated" else "native"
        amp_graph.convert(model, policy=Policy(dtype, emulation=emulation, loss_scale=None))

    def run() -> None:
        model.zero_grad()
        with around():
            loss = F.cross_entropy(model(x), y)
        loss.backward()

    return run


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ConversionWarning)
    print(f"torch {torch.__version__}, CPU kernels for {torch.backends.cpu.get_cpu_capability()}")
    for dtype in (torch.bfloat16, torch.float16):
        print(f"\n{dtype}, emulated: {emulates(dtype)}")
        for size in SIZES:
            print(f"  {size} x {size} product: {product(size, dtype):.1f} of float32")
        for make in (mlp, convnet, encoder):
            steps = {name: training_step(make, name, dtype) for name in VARIANTS}
            turns = [{n: seconds(run) for n, run in steps.items()} for _ in range(WARM_UP + TURNS)]
            ratios = [
                f"{name} {statistics.median(t[name] / t['float32'] for t in turns[WARM_UP:]):.1f}"
                for name in VARIANTS[1:]
            ]
            print(f"  {make.__name__}, forward and backward, of float32: {', '.join(ratios)}")


if __name__ == "__main__":
    main()
