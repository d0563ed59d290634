"""What a call of a model costs beside its arithmetic: layers of four features, in microseconds.

    python scripts/call_overhead.py                  on CPU, bfloat16
    python scripts/call_overhead.py --device cuda    as the host sees it: launches, not kernels

`forward` is a call under `no_grad`, `step` a call and its backward pass. The variants take turns,
and the medians are printed.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

import amp_graph

LAYERS = (1, 8, 32)
FEATURES = 4
WARM_UP = 20


def variants(layers: int, device: str) -> dict[str, Callable[[], torch.Tensor]]:
    """The forward pass of each variant."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU()) for _ in range(layers)]
    model = nn.Sequential(*blocks).to(device)
    x = torch.randn(FEATURES, FEATURES, device=device)

    def under_autocast() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            return plain(x)

    plain = copy.deepcopy(model)
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    converted = amp_graph.convert(copy.deepcopy(model), policy="bfloat16")
    pure, low = copy.deepcopy(model).bfloat16(), x.bfloat16()
    return {
        "float32": lambda: plain(x),
        "autocast": under_autocast,
        "torch.compile, eager": lambda: compiled(x),
        "amp_graph": lambda: converted(x),
        "pure": lambda: pure(low),
    }


def step_of(run: Callable[[], torch.Tensor]) -> None:
    run().sum().backward()


def clocked(run: Callable[[], object], device: str) -> float:
    before = time.perf_counter()
    run()
    seconds = time.perf_counter() - before
    if device != "cpu":
        torch.cuda.synchronize()
    return seconds


def measure(layers: int, device: str, turns: int) -> dict[str, tuple[float, float]]:
    """Microseconds of a forward pass and of a step, by variant."""
    made = variants(layers, device)
    forward: dict[str, list[float]] = {name: [] for name in made}
    step: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(WARM_UP + turns):
        for name, run in made.items():
            with torch.no_grad():
                seconds = clocked(run, device)
            whole = clocked(partial(step_of, run), device)
            if turn >= WARM_UP:
                forward[name].append(seconds)
                step[name].append(whole)
    median = statistics.median
    return {name: (median(forward[name]) * 1e6, median(step[name]) * 1e6) for name in made}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--turns", type=int, default=1000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("", title=f"microseconds, torch {torch.__version__}, {arguments.device}")
    rows: dict[str, list[str]] = {}
    for layers in track(LAYERS, "measuring", console=Console(stderr=True)):
        table.add_column(f"{layers}: forward", justify="right")
        table.add_column("step", justify="right")
        for name, times in measure(layers, arguments.device, arguments.turns).items():
            rows.setdefault(name, []).extend(f"{each:.0f}" for each in times)
    for name, cells in rows.items():
        table.add_row(name, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
