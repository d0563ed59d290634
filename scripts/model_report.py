"""Convert every architecture of the test zoo and print a table beside `torch.autocast`.

    python scripts/model_report.py                  all, bfloat16 on CPU
    python scripts/model_report.py --only gpt2 t5   some
    python scripts/model_report.py --batches 300    enough that errors of losses compare, 20 minutes
    python scripts/model_report.py --json out.json  the numbers also as a file

Columns: graphs captured; share of forward matrix products in low precision; casts between
float32 and bfloat16 and the megabytes they read and write in one forward, as converted and
under CPU autocast ("auto"), whose rules keep norms and softmax low; errors against float32 as a
ratio to autocast's (loss: mean over the batches, outputs and gradient: median); seconds that
Dynamo's capture took and what converting added. Exits 1 if a case fails, if a median error ratio,
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
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import zoo
from counting import CastCounter, MatmulCounter
from zoo.measure import autocast, errors, for_autocast, ratio, step, steps

import amp_graph

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


def capture_seconds(case: zoo.Case) -> float:
    """A first forward through Dynamo alone."""
    torch._dynamo.reset()
    model = case.make()
    model.compile(backend="eager")
    args, kwargs = case.batch(0, 0)
    start = time.perf_counter()
    model(*args, **kwargs)
    return time.perf_counter() - start


def convert_seconds(case: zoo.Case, model: torch.nn.Module) -> float:
    """A first forward through Dynamo and all stages."""
    torch._dynamo.reset()
    args, kwargs = case.batch(0, 0)
    start = time.perf_counter()
    model(*args, **kwargs)
    return time.perf_counter() - start


def measure(case: zoo.Case, batches: int) -> Result:
    dynamo = capture_seconds(case)
    model = amp_graph.convert(case.make(), policy="bfloat16")
    both = convert_seconds(case, model)
    model.load_state_dict(case.make().state_dict())
    with MatmulCounter() as products, CastCounter() as casts:
        step(case, model, seed=0)
    with CastCounter() as autocasts:
        step(case, for_autocast(case), seed=0, around=autocast)

    model.load_state_dict(case.make().state_dict())
    reference = steps(case, case.make(), batches)
    ours = errors(reference, steps(case, model, batches))
    theirs = errors(reference, steps(case, for_autocast(case), batches, around=autocast))
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


def table_of(results: list[Result]) -> Table:
    table = Table(title="bfloat16 on CPU, beside torch.autocast", header_style="bold")
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
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    console = Console(width=None if sys.stdout.isatty() else 170)
    chosen = [c for c in zoo.cases() if not options.only or c.name in options.only]
    if not chosen:
        console.print(f"no such case; there are: {', '.join(c.name for c in zoo.cases())}")
        return 2
    capture_seconds(chosen[0])  # the first capture of a process also imports what Dynamo needs
    results, failed = [], {}
    for case in track(chosen, description="models", console=console, transient=True):
        try:
            results.append(measure(case, options.batches))
        except Exception as error:
            failed[case.name] = f"{type(error).__name__}: {error}"
        gc.collect()
    if results:
        console.print(table_of(results))
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
