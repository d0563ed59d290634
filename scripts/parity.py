"""Training to convergence in mixed precision ends where float32 ends.

    python scripts/parity.py                    all tasks, 5 seeds, ten minutes to half an hour
    python scripts/parity.py --task lstm --seeds 3 --share 0.2
    python scripts/parity.py --task gan --autocast      torch.autocast and GradScaler beside it
    python scripts/parity.py --device cuda              on a GPU, float16 for all

Tasks on real data: a ConvNet, a GAN and a detector with three losses on scikit-learn's handwritten
digits; an LSTM and transformers of 2 and 12 layers that read the Python standard library's sources,
character by character. Every task is trained from the same seeds in float32 and in mixed precision
(the loops differ in the one line that converts): bfloat16, and float16 where that is fast enough.
The mean final metric has to lie within what float32 gives from seed to seed; ends with an error if
one does not. Metrics are measured in float32, on data held out, and smaller is better.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from parity_tasks import TASKS, Task
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import amp_graph


def final_metric(task: Task, precision: str, seed: int, steps: int) -> float:
    """Train from a seed in "float32", which converts nothing, in "float16" or "bfloat16", or in
    "autocast float16" or so."""

    def convert(model: nn.Module, optimizer: Optimizer) -> torch.amp.GradScaler:
        baseline, _, dtype = precision.rpartition(" ")
        if baseline:
            run_under_autocast(model, dtype)
        elif dtype != "float32":
            amp_graph.convert(model, optimizer, policy=dtype)
        device = torch.get_default_device().type
        return torch.amp.GradScaler(device, enabled=precision == "autocast float16")

    torch._dynamo.reset()
    torch.manual_seed(seed)
    return task.train(convert, steps)


def run_under_autocast(model: nn.Module, dtype: str) -> None:
    """Results in float32, as losses under autocast would have them."""
    forward = model.forward

    def lower(*args: Any) -> Any:
        with torch.autocast(torch.get_default_device().type, getattr(torch, dtype)):
            return tree_map(lambda value: value.float(), forward(*args))

    model.forward = lower


def is_within(mixed: list[float], float32: list[float]) -> bool:
    return min(float32) <= mean(mixed) <= max(float32)


def precisions(task: Task, autocast: bool) -> list[str]:
    is_on_cpu = torch.get_default_device().type == "cpu"
    dtypes = task.dtypes if is_on_cpu else ("bfloat16", "float16")
    beside = [f"autocast {dtype}" for dtype in dtypes] if autocast else []
    return ["float32", *dtypes, *beside]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=[*TASKS], action="append", help="default: all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--share", type=float, default=1.0, help="of the steps")
    parser.add_argument("--autocast", action="store_true", help="torch.autocast beside it")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_device(arguments.device)
    torch.backends.cudnn.allow_tf32 = False  # so that float32 is
    warnings.simplefilter("error", amp_graph.ConversionWarning)
    warnings.filterwarnings("ignore", ".* may be slower than in float32")  # float16 on most CPUs
    names = arguments.task or [*TASKS]
    table = Table("task", "metric", "precision", "mean", "from", "to", "")
    found: dict[tuple[str, str], list[float]] = {}
    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        runs = [(n, p, s) for n in names for p in precisions(TASKS[n], arguments.autocast)
                for s in range(arguments.seeds)]  # fmt: skip
        bar = progress.add_task("", total=len(runs))
        for name, precision, seed in runs:
            progress.update(bar, description=f"{name} {precision} seed {seed}")
            steps = max(2, int(TASKS[name].steps * arguments.share))
            metric = final_metric(TASKS[name], precision, seed, steps)
            found.setdefault((name, precision), []).append(metric)
            progress.advance(bar)
    bad = []
    for (name, precision), metrics in found.items():
        within = is_within(metrics, found[name, "float32"])
        bad += [] if within or precision.startswith("autocast") else [f"{name} in {precision}"]
        numbers = [f"{value:.4f}" for value in (mean(metrics), min(metrics), max(metrics))]
        verdict = "" if precision == "float32" else "[green]within" if within else "[red]beyond"
        table.add_row(name, TASKS[name].metric, precision, *numbers, verdict)
    Console().print(table)
    if bad:
        sys.exit(f"beyond float32's seeds: {', '.join(bad)}")


if __name__ == "__main__":
    main()
