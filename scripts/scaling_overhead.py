"""What loss scaling costs per step, beside torch.amp.GradScaler.

    python scripts/scaling_overhead.py                      four models, bfloat16, fused AdamW
    python scripts/scaling_overhead.py --models resnet --optimizer foreach --clip
    python scripts/scaling_overhead.py --device cuda --dtype float16

A step is forward, backward, the optimizer's step and zero_grad; with `--clip`, also clipping. The
cost is a step with scaling less the same step without: a converted model with and without its
loss scale, and torch.autocast with and without a GradScaler. Nothing overflows. Counted per step:
operators dispatched, bytes that they read and write, reads by the host, calls that Python makes of
functions of its own and of C (in this thread, which on a GPU is not that of the backward pass).
Clocked: processor time of the process, in turns of random order, the median of the differences
within a turn.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests"), str(HERE.parent)]

import torch
from bench_models import WORKLOADS, Workload, workload_of
from counting import DispatchCounter, HostReads, tensors
from rich.console import Console
from rich.table import Table
from torch import nn

import amp_graph

Step = Callable[[], None]
SCALE = 2.0**10  # at which nothing overflows
OPTIMIZERS = {
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-4),
}
VARIANTS = ("ours", "ours scaled", "autocast", "autocast scaled")


class Launches(DispatchCounter):
    """Operators, and the bytes of what they read and write; views move none."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.bytes = 0

    def record(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        self.operators += 1
        given, made = list(tensors(args)), list(tensors(result))
        memories = {t.untyped_storage()._cdata for t in given}
        is_view = any(t.untyped_storage()._cdata in memories for t in made)
        if name.endswith("_") or not (is_view or name.startswith("empty")):
            self.bytes += sum(t.nbytes for t in (*given, *made))


def variants(work: Workload, args: argparse.Namespace) -> dict[str, Step]:
    dtype = getattr(torch, args.dtype)
    made = {}
    for name in VARIANTS:
        model = copy.deepcopy(work.model)
        optimizer = OPTIMIZERS[args.optimizer](model.parameters())
        is_ours, is_scaled = name.startswith("ours"), name.endswith("scaled")
        if is_ours:
            scale = amp_graph.LossScale(SCALE) if is_scaled else None
            policy = amp_graph.Policy(dtype, loss_scale=scale)
            amp_graph.convert(model, optimizer, policy=policy)
        scaler = torch.amp.GradScaler(
            args.device, init_scale=SCALE, enabled=is_scaled and not is_ours
        )
        made[name] = _step(work, model, optimizer, scaler, None if is_ours else dtype, args)
    return made


def _step(
    work: Workload,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    autocast: torch.dtype | None,
    args: argparse.Namespace,
) -> Step:
    def step() -> None:
        with torch.autocast(args.device, dtype=autocast, enabled=autocast is not None):
            loss = work.loss(model)
        scaler.scale(loss).backward()
        if args.clip:
            scaler.unscale_(optimizer)
            # Not by foreach: those calls raise no version under a dispatch mode (torch 2.13), so
            # that a counted step would skip the check that the clipped gradients get.
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def counted(step: Step) -> tuple[int, int, int, int]:
    launches, reads = Launches(), HostReads()
    with launches:
        step()
    with reads:
        step()
    # The first call under a profiler is captured anew, and the next one watched.
    return launches.operators, launches.bytes, reads.count, [calls(step) for _ in range(3)][-1]


def calls(step: Step) -> int:
    found: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, argument: found.update([event]))
    try:
        step()
    finally:
        sys.setprofile(None)
    return found["call"] + found["c_call"]


def clocked(steps: dict[str, Step], device: str, turns: int) -> dict[str, float]:
    """Cost of scaling in seconds."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    differences: dict[str, list[float]] = {"ours": [], "autocast": []}
    for _ in range(turns):
        seconds = {}
        for name in random.sample(list(steps), len(steps)):
            before = clock()
            steps[name]()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds[name] = clock() - before
        for base, found in differences.items():
            found.append(seconds[f"{base} scaled"] - seconds[base])
    return {base: statistics.median(found) for base, found in differences.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = ["mlp", "gpt launch-bound", "resnet", "ncf"]
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="fused")
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--turns", type=int, default=40)
    args = parser.parse_args()
    columns = ("operators", "MiB", "host reads", "calls", "ms", "/ GradScaler")
    shown = Table("model", "scaling by", *columns)
    for name in args.models:
        torch.manual_seed(0)
        steps = variants(workload_of(name, args.device, args.device == "cuda"), args)
        for _ in range(5):
            for step in steps.values():
                step()
        counts = {variant: counted(step) for variant, step in steps.items()}
        cost = clocked(steps, args.device, args.turns)
        for base, label in (("ours", "amp_graph"), ("autocast", "GradScaler")):
            pairs = zip(counts[f"{base} scaled"], counts[base], strict=True)
            operators, moved, reads, called = (a - b for a, b in pairs)
            ratio = f"{cost['ours'] / cost['autocast']:.2f}" if base == "ours" else ""
            counted_of = (f"{operators}", f"{moved / 2**20:.2f}", f"{reads}", f"{called}")
            clocked_of = (f"{cost[base] * 1e3:.3f}", ratio)
            shown.add_row(name if base == "ours" else "", label, *counted_of, *clocked_of)
    title = [f"torch {torch.__version__}", args.device, args.dtype, f"{args.optimizer} optimizer"]
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(", ".join([*title, "clipping" if args.clip else "no clipping"]), shown)


if __name__ == "__main__":
    main()
