"""Whole training steps, amp_graph beside what it would replace.

    python scripts/bench.py                         every model, bfloat16 on CPU or float16 on CUDA
    python scripts/bench.py --models mlp ncf        some of them
    python scripts/bench.py --compile               torch.compile of each variant as well
    python scripts/bench.py --device cuda --dtype float16 --json bench.json

A step is forward, backward, clipping by norm and a fused AdamW. One process per model; the variants
take turns in random order, and what is printed are medians of ratios within one turn, with their
quartiles. The counters do not depend on the machine: operators dispatched, casts (a fused call on
many tensors is one), bytes cast, and bytes kept for backward, all per step.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "tests")]

import torch
from bench_models import WORKLOADS, Workload
from counting import CASTS, COPIES, LOW, DispatchCounter, tensors
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

import amp_graph


@dataclass(frozen=True)
class Variant:
    """A model in one precision: its forward pass up to the loss, and its whole training step."""

    model: nn.Module
    forward: Callable[[], torch.Tensor]
    step: Callable[[], None]


@dataclass
class Counters:
    """One step of one variant."""

    operators: int = 0
    casts: int = 0
    cast_bytes: int = 0
    saved_bytes: int = 0


class Launches(DispatchCounter):
    """Counts operators, and casts by call rather than by tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.counters = Counters()

    def record(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        self.counters.operators += 1
        if name not in CASTS | COPIES:
            return
        pairs = zip(tensors(args[0]), tensors(result if name in CASTS else args[1]), strict=False)
        moved = sum(
            a.numel() * (a.element_size() + b.element_size())
            for a, b in pairs
            if torch.float32 in (a.dtype, b.dtype) and {a.dtype, b.dtype} & set(LOW)
        )
        self.counters.casts += moved > 0
        self.counters.cast_bytes += moved


class Saved:
    """Bytes of distinct memory that autograd keeps for backward, parameters apart."""

    def __init__(self, model: nn.Module):
        self.memory: dict[int, int] = {}
        self._own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self.memory[storage.data_ptr()] = storage.nbytes()
        return tensor


def training_step(
    work: Workload, model: nn.Module, device: str, dtype: torch.dtype | None, scaled: bool
) -> Variant:
    """A step under autocast of `dtype`, if given, and with a GradScaler."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler(device, enabled=scaled)

    def forward() -> torch.Tensor:
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            return work.loss(model)

    def step() -> None:
        scaler.scale(forward()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return Variant(model, forward, step)


def variants(name: str, device: str, dtype: torch.dtype, compiled: bool) -> dict[str, Variant]:
    torch.manual_seed(0)
    work = WORKLOADS[name](device)
    work.model.to(device)
    scaled = dtype is torch.float16

    def fresh() -> nn.Module:
        return copy.deepcopy(work.model)

    def amp() -> Variant:
        model = amp_graph.convert(fresh(), policy=amp_graph.Policy(dtype))
        return training_step(work, model, device, None, False)

    def pure() -> Variant:
        model = fresh().to(dtype)
        lowered = _with_low_inputs(model, dtype)
        return training_step(work, lowered, device, None, False)

    steps = {
        "float32": training_step(work, fresh(), device, None, False),
        "autocast": training_step(work, fresh(), device, dtype, scaled),
        "amp_graph": amp(),
        "pure low": pure(),
    }
    if compiled:
        steps["compiled autocast"] = training_step(
            work, torch.compile(fresh()), device, dtype, scaled
        )
    return steps


def _with_low_inputs(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Inputs are cast on the way in and outputs on the way out, so that the loss is the same."""

    def lower(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(a.to(dtype) if a.is_floating_point() else a for a in args)

    model.register_forward_pre_hook(lower)
    model.register_forward_hook(lambda _, args, result: result.float())
    return model


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """All variants of one model, in this process."""
    dtype = getattr(torch, args.dtype)
    steps = variants(name, args.device, dtype, args.compile)
    started = {}
    for label, variant in steps.items():
        before = time.perf_counter()
        variant.step()
        started[label] = time.perf_counter() - before
        for _ in range(4):
            variant.step()
    counters = {} if args.compile else {label: asdict(count(v)) for label, v in steps.items()}
    seconds: dict[str, list[float]] = {label: [] for label in steps}
    for _ in range(args.turns):
        for label in random.sample(list(steps), len(steps)):
            before = time.perf_counter()
            steps[label].step()
            if args.device == "cuda":
                torch.cuda.synchronize()
            seconds[label].append(time.perf_counter() - before)
    return {"model": name, "seconds": seconds, "counters": counters, "first_call": started}


def count(variant: Variant) -> Counters:
    launches = Launches()
    with launches:
        variant.step()
    saved = Saved(variant.model)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda t: t):
        variant.forward()
    launches.counters.saved_bytes = sum(saved.memory.values())
    return launches.counters


def ratio(seconds: dict[str, list[float]], variant: str, base: str) -> str:
    ratios = sorted(a / b for a, b in zip(seconds[variant], seconds[base], strict=True))
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{statistics.median(ratios):.2f} [dim]({low:.2f}-{high:.2f})[/dim]"


def table(results: list[dict[str, Any]]) -> Table:
    columns = ("model", "variant", "ms", "/ autocast", "/ pure low")
    counted = ("operators", "casts", "cast MiB", "saved MiB")
    shown = Table(*columns, *counted, title="one training step")
    for result in results:
        seconds = result["seconds"]
        for variant, times in seconds.items():
            c = result["counters"].get(variant)
            counts = (
                (
                    str(c["operators"]),
                    str(c["casts"]),
                    _mib(c["cast_bytes"]),
                    _mib(c["saved_bytes"]),
                )
                if c
                else ("",) * 4
            )
            shown.add_row(
                result["model"] if variant == "float32" else "",
                variant,
                f"{statistics.median(times) * 1e3:.1f}",
                ratio(seconds, variant, "autocast"),
                ratio(seconds, variant, "pure low"),
                *counts,
            )
        shown.add_section()
    return shown


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f}"


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"))
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.dtype = args.dtype or ("float16" if args.device == "cuda" else "bfloat16")
    if args.one:
        print(json.dumps(measure(args.one, args)))
        return
    results = []
    options = ["--device", args.device, "--dtype", args.dtype, "--turns", str(args.turns)]
    options += ["--compile"] if args.compile else []
    for name in track(args.models, "measuring", console=Console(stderr=True)):
        command = [sys.executable, __file__, "--one", name, *options]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
    console = Console()
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    console.print(
        f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads, {args.dtype}"
    )
    console.print(table(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
