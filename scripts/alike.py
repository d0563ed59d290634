"""What a model costs that is like one before, in milliseconds: copies, as in federated learning.

    python scripts/alike.py

Each copy is trained for a step, `torch.compile`d or converted where that is the variant. *each
captured* forgets what was captured of those before. Medians, without the first of each.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._dynamo.utils import counters

import amp_graph
from amp_graph.calls import capture_cache

Step = Callable[[nn.Module, torch.Tensor], Any]


def conv_net() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)]
    return nn.Sequential(*layers), torch.randn(8, 1, 8, 8)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(4, 16, 32)


MODELS = {"conv net": conv_net, "transformer, 6 layers": transformer}


def under_autocast(model: nn.Module, x: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x)


def compiled_under_autocast(model: nn.Module, x: torch.Tensor) -> Any:
    model.compile(backend="eager")
    return under_autocast(model, x)


def converted(model: nn.Module, x: torch.Tensor) -> Any:
    return amp_graph.convert(model, policy="bfloat16")(x)


def each_captured(model: nn.Module, x: torch.Tensor) -> Any:
    capture_cache.clear()
    return converted(model, x)


VARIANTS: dict[str, Step] = {
    "float32": lambda model, x: model(x),
    "autocast": under_autocast,
    "torch.compile, eager, autocast": compiled_under_autocast,
    "amp_graph": converted,
    "amp_graph, each captured": each_captured,
}


def measure(step: Step, model: nn.Module, x: torch.Tensor, copies: int) -> tuple[float, int]:
    """Milliseconds per copy, and how many frames were captured after the first."""
    times, frames = [], 0
    torch._dynamo.reset()
    for number in range(copies + 1):
        local = copy.deepcopy(model)
        before = time.perf_counter()
        step(local, x).square().mean().backward()
        times.append(time.perf_counter() - before)
        if number == 0:
            frames = counters["frames"]["total"]
    return statistics.median(times[1:]) * 1e3, counters["frames"]["total"] - frames


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--copies", type=int, default=10)
    copies = parser.parse_args().copies
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = Table("", title=f"milliseconds per copy, and captures for {copies}")
    rows: dict[str, list[str]] = {}
    for name, make in MODELS.items():
        table.add_column(name, justify="right")
        table.add_column("captures", justify="right")
        model, x = make()
        for variant, step in VARIANTS.items():
            milliseconds, captures = measure(step, model, x, copies)
            rows.setdefault(variant, []).extend([f"{milliseconds:.1f}", str(captures)])
    for variant, cells in rows.items():
        table.add_row(variant, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
