"""What the pass decides for CUDA, at each level, for every model of the test zoo; no GPU is needed.

    python scripts/cuda_plans.py                    all models, float16
    python scripts/cuda_plans.py --dtype bfloat16 gpt2 bert

Graphs are captured on CPU and moved to fake tensors on a CUDA device; casts are those of one
forward, without those of weights. Kernels that ask for a CUDA build even of fake tensors (batch
norm, conv1d, some interpolations) count as if they refused low precision. Exits 1 if a graph fails
a check and would run as captured.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent)]

import torch
import zoo
from cuda_graphs import on_cuda
from grappler import captured_plans
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import fx

from amp_graph.backend.rewrite import rewrite
from amp_graph.levels import Level
from amp_graph.policy import Policy


def cells(graphs: list[fx.GraphModule], policy: Policy) -> list[str]:
    """Low operators, casts and their kilobytes of a model's graphs. Raises what a stage raises."""
    plans = [rewrite(graph, policy, policy.load_lists())[1] for graph in graphs]
    parts = [part for plan in plans for part in plan.parts()]
    if failed := [part.fallback for part in parts if part.fallback]:
        raise RuntimeError(failed[0])
    low, casts = sum(len(part.low) for part in parts), sum(len(p.casts_inside) for p in plans)
    return [f"{low}", f"{casts}", f"{sum(plan.cast_bytes for plan in plans) / 1e3:.1f}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help="names of cases; default all")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table("model", title=f"{options.dtype} on CUDA: low nodes, casts, kB")
    for level in Level:
        for column in (level.value, "casts", "kB"):
            table.add_column(column, justify="right")
    failed = 0
    chosen = [c for c in zoo.cases() if not options.models or c.name in options.models]
    for case in track(chosen, description="models", console=console, transient=True):
        torch._dynamo.reset()
        seen = captured_plans(case.make(), *case.batch(0, 0), "bfloat16")
        graphs = [on_cuda(captured) for captured, _ in seen]
        row = []
        for level in Level:
            try:
                row += cells(graphs, Policy(options.dtype, level=level.value))
            except Exception as error:
                failed += 1
                row += ["failed", "", ""]
                console.print(f"[red]{case.name}, {level.value}[/]: {error}", highlight=False)
        table.add_row(case.name, *row)
    console.print(table)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
