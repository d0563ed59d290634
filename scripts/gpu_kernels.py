"""Where the time of a training step goes on a GPU: kernels, by variant.

    python scripts/gpu_kernels.py --models mlp "gpt launch-bound" resnet

One process, float16, models of real size. A line for each variant: a step's median time, how long
it took to launch, how many kernels ran and how long they were at work; what is between the last
and the first, the GPU waited. Then the kernels that took longest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests"), str(HERE.parent)]

import torch
from bench_models import WORKLOADS
from bench_variants import Settings, variants
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

WARM_UP, TURNS, PROFILED = 5, 12, 2
SHOWN = ("autocast", "amp_graph", "pure low")


@dataclass
class Times:
    """Of one variant's steps, in seconds."""

    whole: list[float] = field(default_factory=list)
    launching: list[float] = field(default_factory=list)

    def add(self, step: Callable[[], None]) -> None:
        start = time.perf_counter()
        step()
        self.launching.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        self.whole.append(time.perf_counter() - start)


def shown(name: str, dtype: str, top: int) -> Table:
    settings = Settings(device="cuda", dtype=dtype, size="gpu", variants=list(SHOWN))
    made = {label: make() for label, make in variants(name, settings) if label in SHOWN}
    for variant in made.values():
        for _ in range(WARM_UP):
            variant.step()
    torch.cuda.synchronize()
    times = {label: Times() for label in made}
    for _ in range(TURNS):
        for label, variant in made.items():
            times[label].add(variant.step)
    table = Table(
        "variant, kernel", "step ms", "launched in ms", "kernels", "at work ms", title=name
    )
    for label, variant in made.items():
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(PROFILED):
                variant.step()
            torch.cuda.synchronize()
        events = [e for e in found.key_averages() if e.self_device_time_total]
        events.sort(key=lambda e: -e.self_device_time_total)
        medians = (statistics.median(t) for t in (times[label].whole, times[label].launching))
        whole, launching = (f"{seconds * 1e3:.2f}" for seconds in medians)
        count = sum(e.count for e in events) / PROFILED
        work = sum(e.self_device_time_total for e in events) / PROFILED / 1e3
        table.add_row(label, whole, launching, f"{count:.0f}", f"{work:.2f}", style="bold")
        for e in events[:top]:
            at_work = f"{e.self_device_time_total / PROFILED / 1e3:.3f}"
            table.add_row(f"  {e.key[:90]}", "", "", f"{e.count / PROFILED:.0f}", at_work)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--top", type=int, default=12, help="kernels to show of each variant")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)
    if not torch.cuda.is_available():
        console.print("there is no CUDA device")
        return 2
    console.print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {args.dtype}")
    for name in args.models:
        console.print(shown(name, args.dtype, args.top))
        torch.cuda.empty_cache()
        torch._dynamo.reset()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
