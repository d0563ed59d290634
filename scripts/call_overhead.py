"""What a call of a model costs beside its arithmetic: layers of few features, in microseconds.

    python scripts/call_overhead.py                  on CPU, bfloat16
    python scripts/call_overhead.py --device cuda    as the host sees it: launches, not kernels
    python scripts/call_overhead.py --calls 20 --features 256 --turns 20

`forward` is a call under `no_grad`, `step` a call and its backward pass. With `--calls` it is so
many calls before one backward pass, as of a cell in a loop of the script's own. The variants take
turns, and the medians are printed; beside them the operators of a step, views included.
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

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import torch
from counting import Names
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

import amp_graph

LAYERS = (1, 8, 32)
WARM_UP = 20


def variants(
    layers: int, features: int, calls: int, device: str
) -> dict[str, Callable[[], torch.Tensor]]:
    """The forward pass of each variant."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(features, features), nn.ReLU()) for _ in range(layers)]
    model = nn.Sequential(*blocks).to(device)
    x = torch.randn(features, features, device=device)

    def called(model: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        for _ in range(calls - 1):
            y = y + model(y)
        return y

    def under_autocast() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            return called(plain, x)

    plain, low = copy.deepcopy(model), x.bfloat16()
    kept = amp_graph.Policy("bfloat16", refresh_weights="on_change")
    others: dict[str, Callable[..., torch.Tensor]] = {
        "torch.compile, eager": torch.compile(copy.deepcopy(model), backend="eager"),
        "amp_graph": amp_graph.convert(copy.deepcopy(model), policy="bfloat16"),
        "amp_graph, on_change": amp_graph.convert(copy.deepcopy(model), policy=kept),
    }
    return {
        "float32": lambda: called(plain, x),
        "autocast": under_autocast,
        **{name: partial(called, other, x) for name, other in others.items()},
        "pure": partial(called, copy.deepcopy(model).bfloat16(), low),
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


def measure(layers: int, arguments: argparse.Namespace) -> dict[str, tuple[float, float, int]]:
    """Microseconds of a forward pass and of a step, and a step's operators, by variant."""
    device = arguments.device
    made = variants(layers, arguments.features, arguments.calls, device)
    forward: dict[str, list[float]] = {name: [] for name in made}
    step: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(WARM_UP + arguments.turns):
        for name, run in made.items():
            with torch.no_grad():
                seconds = clocked(run, device)
            whole = clocked(partial(step_of, run), device)
            if turn >= WARM_UP:
                forward[name].append(seconds)
                step[name].append(whole)
    return {
        name: (
            statistics.median(forward[name]) * 1e6,
            statistics.median(step[name]) * 1e6,
            operators_of(run),
        )
        for name, run in made.items()
    }


def operators_of(run: Callable[[], torch.Tensor]) -> int:
    with Names() as ran:
        step_of(run)
    return len(ran.names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=1)
    parser.add_argument("--features", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("", title=f"microseconds, torch {torch.__version__}, {arguments.device}")
    rows: dict[str, list[str]] = {}
    for layers in track(LAYERS, "measuring", console=Console(stderr=True)):
        table.add_column(f"{layers}: forward", justify="right")
        table.add_column("step", justify="right")
        table.add_column("operators", justify="right")
        for name, times in measure(layers, arguments).items():
            rows.setdefault(name, []).extend(f"{each:.0f}" for each in times)
    for name, cells in rows.items():
        table.add_row(name, *cells)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
