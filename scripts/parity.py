"""Training to convergence in mixed precision ends where float32 ends.

    python scripts/parity.py                    all tasks, 5 seeds, about half an hour
    python scripts/parity.py --task lstm --seeds 3 --share 0.2

Five tasks on real data: a ConvNet, a GAN and a detector with three losses on scikit-learn's
handwritten digits; an LSTM and a transformer that read the Python standard library's sources,
character by character. Every task is trained from the same seeds in float32 and in mixed precision
(the loops differ in the one line that converts), bfloat16, and float16 for the small ones. The mean
final metric has to lie within what float32 gives from seed to seed; ends with an error if one does
not. Metrics are measured in float32, on data held out, and smaller is better.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from statistics import mean
from typing import Any

import torch
from parity_tasks import TASKS, Task, amp_graph
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.optim import Optimizer


def final_metric(task: Task, dtype: str, seed: int, steps: int) -> float:
    """Train from a seed; `dtype` "float32" converts nothing."""

    def convert(model: nn.Module, optimizer: Optimizer) -> None:
        if dtype != "float32":
            amp_graph.convert(model, optimizer, policy=dtype)

    torch._dynamo.reset()
    torch.manual_seed(seed)
    return task.train(convert, steps)


def is_within(mixed: list[float], float32: list[float]) -> bool:
    return min(float32) <= mean(mixed) <= max(float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=[*TASKS], action="append", help="default: all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--share", type=float, default=1.0, help="of the steps")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("error", amp_graph.ConversionWarning)
    names = arguments.task or [*TASKS]
    table = Table("task", "metric", "precision", "mean", "from", "to", "")
    found: dict[tuple[str, str], list[float]] = {}
    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        runs = [(n, d, s) for n in names for d in ("float32", *TASKS[n].dtypes)
                for s in range(arguments.seeds)]  # fmt: skip
        bar = progress.add_task("", total=len(runs))
        for name, dtype, seed in runs:
            progress.update(bar, description=f"{name} {dtype} seed {seed}")
            steps = max(2, int(TASKS[name].steps * arguments.share))
            metric = final_metric(TASKS[name], dtype, seed, steps)
            found.setdefault((name, dtype), []).append(metric)
            progress.advance(bar)
    bad = []
    for (name, dtype), metrics in found.items():
        within = is_within(metrics, found[name, "float32"])
        bad += [] if within else [f"{name} in {dtype}"]
        numbers = [f"{value:.4f}" for value in (mean(metrics), min(metrics), max(metrics))]
        verdict = "" if dtype == "float32" else "[green]within" if within else "[red]beyond"
        table.add_row(name, TASKS[name].metric, dtype, *numbers, verdict)
    Console().print(table)
    if bad:
        sys.exit(f"beyond float32's seeds: {', '.join(bad)}")


if __name__ == "__main__":
    main()
