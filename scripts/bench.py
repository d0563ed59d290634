"""Whole training steps, amp_graph beside what it would replace.

    python scripts/bench.py                         every model, bfloat16 on CPU or float16 on CUDA
    python scripts/bench.py --models mlp ncf        some of them
    python scripts/bench.py --compile               torch.compile of each variant as well
    python scripts/bench.py --accumulate 4          four micro-batches to a step
    python scripts/bench.py --inference --refresh-weights on_change     forward passes alone
    python scripts/bench.py --scale                 loss scaling in bfloat16 as well
    python scripts/bench.py --emulate-cuda          autocast by CUDA's rules, for its counters
    python scripts/bench.py --turns 8 --steps 2 --jobs 3 --json bench.json      on a GPU

A step is forward, backward, clipping by norm and a fused AdamW. One process per model; the variants
take turns in random order, and what is printed are medians of ratios within one turn, with their
quartiles. With `--jobs 3` three models are made and captured beside each other, and timed one by
one when all three are ready. The counters do not depend on the machine: operators dispatched, casts
(a fused call on many tensors is one), bytes cast, how often the host reads a value back, bytes kept
for backward, and the most bytes allocated, parameters and optimizer included. The gradient error is
the distance to float32's gradients on the first batch, in the 2-norm, relative; of a model with
dropout there is none.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "tests", "")]

import torch
from bench_counters import count, first_call, resident_bytes
from bench_models import WORKLOADS
from bench_report import first_call_table, is_compiled, plot, step_table
from bench_variants import Settings, Variant, variants
from rich.console import Console
from rich.progress import track
from torch import nn

from amp_graph.levels import Level
from amp_graph.policy import REFRESH

WARM_UP = 3
READY = "ready to be timed"
# For glibc's allocator: keep what was freed. Else it gives memory back between steps or does not,
# by chance of the heap, and to get it again costs more than what is compared.
KEEP_HEAP = {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_THRESHOLD_": str(2**25)}


def measure(
    name: str, settings: Settings, when_ready: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """All variants of one model, in this process. Only their times are taken after `when_ready`."""
    made: dict[str, Variant] = {}
    errors, counters, started = {}, {}, {}
    reference: Any = None
    for label, make in variants(name, settings):
        before = resident_bytes(settings.device)
        made[label] = variant = make()
        with first_call() as started[label]:
            variant.begin()
        gradients = variant.gradients()
        reference = gradients if reference is None else reference
        error = float((gradients - reference).norm() / reference.norm())
        errors[label] = None if _has_dropout(variant.model) else error
        del gradients
        for _ in range(WARM_UP):
            variant.step()
        held = resident_bytes(settings.device) - before
        if label == "float32":
            held -= reference.nbytes
        is_captured = label.startswith("amp_graph") or is_compiled(label)
        counters[label] = count(variant, held, is_captured)
    del reference
    if settings.device == "cuda":
        torch.cuda.empty_cache()
    when_ready()
    return {
        "model": name,
        "seconds": _seconds(made, settings),
        "counters": {label: asdict(c) for label, c in counters.items()},
        "first_call": {label: asdict(f) for label, f in started.items()},
        "gradient_error": errors,
    }


def _has_dropout(model: nn.Module) -> bool:
    return any(isinstance(m, nn.Dropout) and m.p for m in model.modules())


def _seconds(made: dict[str, Variant], settings: Settings) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {label: [] for label in made}
    clock = time.process_time if settings.cpu_time else time.perf_counter
    for variant in made.values():
        variant.step()
    for _ in range(settings.turns):
        for label in random.sample(list(made), len(made)):
            before = clock()
            for _ in range(settings.steps):
                made[label].step()
            if settings.device == "cuda":
                torch.cuda.synchronize()
            seconds[label].append((clock() - before) / settings.steps)
    return seconds


def arguments() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"))
    parser.add_argument("--size", choices=("cpu", "gpu"), help="default: for the device")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--steps", type=int, default=1, help="to a turn, then to wait for the GPU")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches to a step")
    parser.add_argument("--inference", action="store_true", help="forward passes for steps")
    parser.add_argument(
        "--refresh-weights", choices=REFRESH, default="always", help="of the policy"
    )
    parser.add_argument("--compile", action="store_true", help="compiled variants as well")
    parser.add_argument("--mode", help="of torch.compile, such as reduce-overhead")
    parser.add_argument(
        "--levels",
        nargs="*",
        default=[],
        choices=[level.value for level in Level],
        help="of the policy",
    )
    parser.add_argument("--variants", nargs="+", default=[], help="beside float32 and autocast")
    parser.add_argument("--scale", action="store_true", help="loss scaling in bfloat16, too")
    parser.add_argument("--emulate-cuda", action="store_true", help="autocast by CUDA's rules")
    parser.add_argument(
        "--cpu-time", action="store_true", help="time of the process: for a busy machine, 1 thread"
    )
    parser.add_argument("--jobs", type=int, default=1, help="models that get ready together")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="an SVG")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.dtype = args.dtype or ("float16" if args.device == "cuda" else "bfloat16")
    args.size = args.size or ("gpu" if args.device == "cuda" else "cpu")
    return args


def in_processes(names: list[str], jobs: int) -> Iterator[dict[str, Any] | None]:
    """What is measured of each model, or None where its process failed."""
    environment = KEEP_HEAP | os.environ
    for start in range(0, len(names), jobs):
        started = {name: _one(name, environment) for name in names[start : start + jobs]}
        for process in started.values():
            assert process.stdout is not None
            any(line.strip() == READY for line in process.stdout)
        for name, process in started.items():
            printed, _ = process.communicate("\n")
            if process.returncode:
                print(f"{name}: ended with {process.returncode}", file=sys.stderr)
            yield None if process.returncode else json.loads(printed.splitlines()[-1])


def _told_to_go_on() -> None:
    print(READY, flush=True)
    sys.stdin.readline()


def _one(name: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, *sys.argv, "--one", name]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def main() -> None:
    args = arguments()
    fields = Settings.__dataclass_fields__
    settings = Settings(**{k: v for k, v in vars(args).items() if k in fields})
    if args.one:
        print(json.dumps(measure(args.one, settings, _told_to_go_on)))
        return
    measured = in_processes(args.models, args.jobs)
    shown = track(measured, "measuring", len(args.models), console=Console(stderr=True))
    results = [found for found in shown if found]
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    where = f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads, {args.dtype}"
    console = Console(width=None if sys.stdout.isatty() else 170)
    console.print(where)
    console.print(step_table(results), first_call_table(results))
    if args.json:
        typed = " ".join(["python", *sys.argv])
        record = {"command": typed, "where": where, "results": results}
        args.json.write_text(json.dumps(record, indent=2))
    if args.plot:
        title = f"time of a training step / autocast ({where})"
        args.plot.write_text(plot(results, title))
    if len(results) < len(args.models):
        sys.exit("some models could not be measured")


if __name__ == "__main__":
    main()
