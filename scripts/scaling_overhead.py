"""What loss scaling costs per step, beside torch.amp.GradScaler.

    python scripts/scaling_overhead.py                      four models, bfloat16, fused AdamW
    python scripts/scaling_overhead.py --models resnet --optimizer foreach --clip
    python scripts/scaling_overhead.py --device cuda --dtype float16
    python scripts/scaling_overhead.py --compile            both compiled by Inductor

A step is forward, backward, the optimizer's step and zero_grad; with `--clip`, also clipping. The
cost is a step with scaling less the same step without: of one converted model, whose loss scale is
switched on and off, and of one model under torch.autocast, with a GradScaler and without. (Between
two copies of a model a step differs by up to 5 percent for where their memory lies, which is more
than scaling costs.) Nothing overflows. Counted per step: operators dispatched, bytes that they read
and write, reads by the host, calls that Python makes of functions of its own and of C (in this
thread, which on a GPU is not that of the backward pass). Clocked: processor time of the process, in
turns of random order, the median of the differences within a turn; the first step after a switch
is not.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests"), str(HERE.parent)]

import torch
from bench import KEEP_HEAP
from bench_models import WORKLOADS, Workload, workload_of
from counting import DispatchCounter, HostReads, tensors
from rich.console import Console
from rich.table import Table
from torch import nn

import amp_graph
from amp_graph.calls.conversion import conversion_of
from amp_graph.optimizers.guards import drop_scale, use_scale

Step = Callable[[], None]
SCALE = 2.0**10  # at which nothing overflows
WARM_UP = 20
OPTIMIZERS = {
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-4),
}
VARIANTS = {"ours": "amp_graph", "autocast": "GradScaler"}


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


class Training:
    """One model, trained with loss scaling or without."""

    def __init__(self, work: Workload, args: argparse.Namespace):
        self.model = copy.deepcopy(work.model)
        self.optimizer = OPTIMIZERS[args.optimizer](self.model.parameters())
        self._work, self._args = work, args
        self._called: Any = self.model  # by itself, or compiled
        self._scaler = self._scaler_that(is_enabled=False)

    def _scaler_that(self, is_enabled: bool) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self._args.device, init_scale=SCALE, enabled=is_enabled)

    def around_forward(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def switch(self, is_scaled: bool) -> None:
        raise NotImplementedError

    def step(self) -> None:
        with self.around_forward():
            loss = self._work.loss(self._called)
        self._scaler.scale(loss).backward()
        if self._args.clip:
            self._scaler.unscale_(self.optimizer)
            # Not by foreach: those calls raise no version under a dispatch mode (torch 2.13), so
            # that a counted step would skip the check that the clipped gradients get.
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=False)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad()


class Ours(Training):
    def __init__(self, work: Workload, args: argparse.Namespace):
        super().__init__(work, args)
        compiler = "inductor" if args.compile else "eager"
        scale = amp_graph.LossScale(SCALE)
        policy = amp_graph.Policy(args.dtype, loss_scale=scale, compiler=compiler)
        amp_graph.convert(self.model, self.optimizer, policy=policy)
        self.step()
        self._record = conversion_of(self.model).compiler.record
        assert self._record.scale is not None, "no graph is scaled"
        self._scale = self._record.scale

    def switch(self, is_scaled: bool) -> None:
        """Have the model be as with the policy's `loss_scale`, or as with None for it."""
        scale = self._scale
        scale.driven_by_grad_scaler = not is_scaled
        self._record.scale = scale if is_scaled else None
        (use_scale if is_scaled else drop_scale)(scale)


class Autocast(Training):
    def __init__(self, work: Workload, args: argparse.Namespace):
        super().__init__(work, args)
        if args.compile:
            self._called = torch.compile(self.model)

    def around_forward(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._args.device, dtype=getattr(torch, self._args.dtype))

    def switch(self, is_scaled: bool) -> None:
        self._scaler = self._scaler_that(is_enabled=is_scaled)


def counted(step: Step) -> tuple[int, int, int, int]:
    launches, reads = Launches(), HostReads()
    with launches:
        step()
    with reads:
        step()
    # Calls under these modes and a profiler were captured anew, and for some calls that is made up
    # for: the model looks back at each, whether or not it is scaled.
    called = [calls(step) for _ in range(WARM_UP)]
    return launches.operators, launches.bytes, reads.count, called[-1]


def calls(step: Step) -> int:
    found: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, argument: found.update([event]))
    try:
        step()
    finally:
        sys.setprofile(None)
    return found["call"] + found["c_call"]


def clocked(trainings: dict[str, Training], device: str, turns: int) -> dict[str, float]:
    """Cost of scaling in seconds."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    differences: dict[str, list[float]] = {name: [] for name in trainings}
    variants = [*itertools.product(trainings, (True, False))]
    for _ in range(turns):
        seconds = {}
        for name, is_scaled in random.sample(variants, len(variants)):
            training = trainings[name]
            training.switch(is_scaled)
            training.step()
            wait_for(device)
            before = clock()
            training.step()
            wait_for(device)
            seconds[name, is_scaled] = clock() - before
        for name, found in differences.items():
            found.append(seconds[name, True] - seconds[name, False])
    return {name: statistics.median(found) for name, found in differences.items()}


def wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = ["mlp", "gpt launch-bound", "resnet", "ncf"]
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="fused")
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--turns", type=int, default=40)
    args = parser.parse_args()
    if not KEEP_HEAP.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], KEEP_HEAP | os.environ)
    columns = ("operators", "MiB", "host reads", "calls", "ms", "/ GradScaler")
    shown = Table("model", "scaling by", *columns)
    for name in args.models:
        torch.manual_seed(0)
        work = workload_of(name, args.device, args.device == "cuda")
        trainings = {"ours": Ours(work, args), "autocast": Autocast(work, args)}
        counts = {}
        for (variant, training), is_scaled in itertools.product(trainings.items(), (True, False)):
            training.switch(is_scaled)
            for _ in range(WARM_UP):
                training.step()
            counts[variant, is_scaled] = counted(training.step)
        cost = clocked(trainings, args.device, args.turns)
        for variant, label in VARIANTS.items():
            pairs = zip(counts[variant, True], counts[variant, False], strict=True)
            operators, moved, reads, called = (a - b for a, b in pairs)
            is_ours = variant == "ours"
            ratio = f"{cost['ours'] / cost['autocast']:.2f}" if is_ours else ""
            counted_of = (f"{operators}", f"{moved / 2**20:.2f}", f"{reads}", f"{called}")
            clocked_of = (f"{cost[variant] * 1e3:.3f}", ratio)
            shown.add_row(name if is_ours else "", label, *counted_of, *clocked_of)
    title = [f"torch {torch.__version__}", args.device, args.dtype, f"{args.optimizer} optimizer"]
    title += ["compiled"] if args.compile else []
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(", ".join([*title, "clipping" if args.clip else "no clipping"]), shown)


if __name__ == "__main__":
    main()
