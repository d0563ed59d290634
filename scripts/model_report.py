"""Convert every architecture of the test zoo and print a table beside `torch.autocast`.

    python scripts/model_report.py                  all, bfloat16 on CPU
    python scripts/model_report.py --only gpt2 t5   some
    python scripts/model_report.py --batches 300    enough that errors of losses compare, 20 minutes
    python scripts/model_report.py --json out.json  the numbers also as a file
    python scripts/model_report.py --device cuda --dtype float16     in another precision, elsewhere
    python scripts/model_report.py --all causal --batches 3
                                    all that the installed transformers has for a task, as far as a
                                    guessed small configuration runs: causal, masked, texts, images

Columns: graphs captured; share of forward matrix products in low precision; casts between
float32 and the low precision and the megabytes they read and write in one forward, as converted and
under autocast ("auto"), whose rules for the CPU keep norms and softmax low; errors against float32
as a ratio to autocast's (loss: mean over the batches, outputs and gradient: median); seconds that
Dynamo's capture took and what converting added. In float16 losses are scaled by 1024, here and
there. Exits 1 if a case fails, if a median error ratio,
to two digits, is above 1, or, from 300 batches on, if any error ratio is above 1.2: over 20 a loss
is off by that much by chance (tests/zoo/measure.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import zoo
from counting import CastCounter, MatmulCounter
from zoo import guessed
from zoo.measure import autocast, errors, for_autocast, on_device_of, ratio, step, steps

import amp_graph

SCALE = 1024.0  # of losses in float16
RATIOS = ("loss_ratio", "outputs_ratio", "gradient_ratio")
ALLOWED_RATIO, MANY_BATCHES = 1.2, 300


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    name: str
    family: str
    graphs: int
    fallbacks: tuple[str, ...]
    low_share: float
    casts: int
    cast_bytes: int
    autocast_casts: int
    autocast_cast_bytes: int
    loss_ratio: float
    outputs_ratio: float
    gradient_ratio: float
    gradient_error: float
    capture_seconds: float
    pass_seconds: float


def fallbacks(plan: amp_graph.Plan) -> list[str]:
    own = [plan.fallback] if plan.fallback else []
    return own + [f for body in plan.bodies.values() for f in fallbacks(body)]


def runs(case: zoo.Case) -> bool:
    """Whether it does, as it is."""
    try:
        return bool(step(case, case.make(), seed=0).loss.isfinite())
    except Exception:
        return False


def capture_seconds(case: zoo.Case, device: str) -> float:
    """A first forward through Dynamo alone."""
    model = case.make().to(device)
    model.compile(backend="eager")
    return first_call_seconds(case, model)


def first_call_seconds(case: zoo.Case, model: torch.nn.Module) -> float:
    torch._dynamo.reset()
    args, kwargs = on_device_of(model, case.batch(0, 0))
    start = time.perf_counter()
    model(*args, **kwargs)
    return time.perf_counter() - start


def measure(case: zoo.Case, device: str, dtype: torch.dtype, batches: int) -> Result:
    def plain() -> torch.nn.Module:
        return case.make().to(device)

    around = partial(autocast, device, dtype)
    scale = SCALE if dtype is torch.float16 else 1.0
    dynamo = capture_seconds(case, device)
    policy = amp_graph.Policy(dtype, loss_scale=scale if dtype is torch.float16 else None)
    model = amp_graph.convert(plain(), policy=policy)
    both = first_call_seconds(case, model)
    model.load_state_dict(plain().state_dict())
    with MatmulCounter() as products, CastCounter() as casts:
        step(case, model, seed=0)
    with CastCounter() as autocasts:
        step(case, for_autocast(case).to(device), seed=0, around=around)

    model.load_state_dict(plain().state_dict())
    reference = steps(case, plain(), batches)
    ours = errors(reference, steps(case, model, batches))
    other = for_autocast(case).to(device)
    theirs = errors(reference, steps(case, other, batches, around=around, scale=scale))
    plans = amp_graph.plans(model)
    return Result(
        name=case.name,
        family=case.family,
        graphs=len(plans),
        fallbacks=tuple(f for plan in plans for f in fallbacks(plan)),
        low_share=products.low_share,
        casts=casts.forward.casts,
        cast_bytes=casts.forward.bytes,
        autocast_casts=autocasts.forward.casts,
        autocast_cast_bytes=autocasts.forward.bytes,
        loss_ratio=ratio(ours.mean("loss"), theirs.mean("loss")),
        outputs_ratio=ratio(ours.typical("outputs"), theirs.typical("outputs")),
        gradient_ratio=ratio(ours.typical("gradient"), theirs.typical("gradient")),
        gradient_error=ours.typical("gradient"),
        capture_seconds=dynamo,
        pass_seconds=max(both - dynamo, 0.0),
    )


def table_of(results: list[Result], title: str) -> Table:
    table = Table(title=title, header_style="bold")
    table.add_column("model", no_wrap=True)
    columns = ["graphs", "left", "low %", "casts", "MB", "auto casts", "auto MB"]
    columns += ["loss ×", "outputs ×", "gradient ×", "gradient error", "Dynamo s", "pass s"]
    for column in columns:
        table.add_column(column, justify="right")
    for r in results:
        table.add_row(*cells(r), style="red" if r.fallbacks or r.low_share < 0.9 else "")
    table.add_section()
    table.add_row(*cells(median_of(results)), style="bold")
    return table


def cells(r: Result) -> list[str]:
    traffic = [r.casts, r.cast_bytes / 1e6, r.autocast_casts, r.autocast_cast_bytes / 1e6]
    return [
        r.name,
        f"{r.graphs}",
        f"{len(r.fallbacks) or ''}",
        f"{100 * r.low_share:.0f}",
        *(f"{x:.0f}" if i % 2 == 0 else f"{x:.3f}" for i, x in enumerate(traffic)),
        *(f"{getattr(r, name):.2f}" for name in RATIOS),
        f"{100 * r.gradient_error:.2f}%",
        f"{r.capture_seconds:.2f}",
        f"{r.pass_seconds:.2f}",
    ]


def median_of(results: list[Result]) -> Result:
    def median(name: str) -> Any:
        return statistics.median(getattr(r, name) for r in results)

    numbers: dict[str, Any] = {
        name: median(name)
        for name, value in asdict(results[0]).items()
        if isinstance(value, int | float)
    }
    numbers["graphs"] = int(numbers["graphs"])
    return Result(name="median", family="", fallbacks=(), **numbers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="CASE", help="names of cases")
    parser.add_argument(
        "--all", choices=list(guessed.TASKS), metavar="TASK", help="of transformers"
    )
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # so that float32 is
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    console = Console(width=None if sys.stdout.isatty() else 170)
    there_are = guessed.cases(options.all) if options.all else zoo.cases()
    chosen = [c for c in there_are if not options.only or c.name in options.only]
    if not chosen:
        console.print(f"no such case; there are: {', '.join(c.name for c in there_are)}")
        return 2
    if options.all:
        asked = len(chosen)
        chosen = [*filter(runs, track(chosen, "plain", console=console, transient=True))]
        console.print(f"{len(chosen)} of {asked} run in a small configuration")
    dtype = getattr(torch, options.dtype)
    # The first capture of a process also imports what Dynamo needs.
    capture_seconds(chosen[0], options.device)
    results, failed = [], {}
    for case in track(chosen, description="models", console=console, transient=True):
        try:
            results.append(measure(case, options.device, dtype, options.batches))
        except Exception as error:
            failed[case.name] = f"{type(error).__name__}: {error}"
        gc.collect()
    if results:
        title = f"{options.dtype} on {options.device}, torch {torch.__version__}, beside autocast"
        console.print(table_of(results, title))
    for r in results:
        for reason in sorted(set(r.fallbacks)):
            console.print(f"[red]{r.name}[/]: left original: {reason}", highlight=False)
    for name, reason in failed.items():
        console.print(f"[red]{name}[/]: failed: {reason}", highlight=False)
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in results], indent=1))
    if not results:
        return 1
    found = [[getattr(r, name) for r in results] for name in RATIOS]
    is_worse = any(round(statistics.median(ratios), 2) > 1.0 for ratios in found)
    if options.batches >= MANY_BATCHES:
        is_worse = is_worse or max(map(max, found)) > ALLOWED_RATIO
    return int(bool(failed) or is_worse)


if __name__ == "__main__":
    raise SystemExit(main())
