"""Set the casts of every model of the test zoo beside autocast's and beside a greedy fill.

    python scripts/placement_report.py              all
    python scripts/placement_report.py gpt2 t5      some
    python scripts/placement_report.py --markdown table.md --errors report.json
                                                    the tables of docs/benchmarks.md as well; the
                                                    errors are from `model_report.py --json`

One forward each. "ours" and "autocast" count the casts between float32 and bfloat16 and their
bytes read and written, autocast by CUDA's rules on the same captured graphs (no GPU needed).
"weights" are casts of parameters, which autocast makes one at a time and we all in one call.
"greedy" is the fill of TensorFlow's grappler on our painted colours; "moved" adds to the casts
what operators that were free to be low move in float32.

A model above autocast says why: what our casts are for that autocast's are not. Autocast returns
low-precision outputs where ours stay float32, and leaves promotion to kernels that read mixed
operands; `grappler.REASONS` holds all such reasons. The rest is shown as unexplained.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import zoo
from cuda_autocast import Casts
from grappler import REASONS, Comparison, compare, excess, unexplained

REASONS_SHOWN = 3


def table_of(results: dict[str, Comparison]) -> Table:
    table = Table(title="casts of one forward, beside CUDA autocast and a greedy fill")
    table.add_column("model")
    sides = ("ours", "kB", "weights", "kB", "autocast", "kB", "weights", "kB")
    for column in (*sides, "moved kB", "greedy kB", "greedy moved kB"):
        table.add_column(column, justify="right")
    table.add_column("above autocast because of (kB)")
    for name, r in results.items():
        numbers = [r.moved, r.greedy_cast_bytes, r.greedy_moved]
        table.add_row(
            name,
            *cast_cells(r.ours),
            *cast_cells(r.autocast),
            *map(kilobytes, numbers),
            why_above(r),
            style="red" if r.moved > r.greedy_moved or unexplained(r.ours, r.autocast) > 0 else "",
        )
    return table


def cast_cells(casts: Casts) -> list[str]:
    """Casts of activations, then those of parameters; each their number and kilobytes."""
    count, size = casts.count - casts.weights, casts.bytes - casts.weight_bytes
    return [f"{count}", kilobytes(size), f"{casts.weights}", kilobytes(casts.weight_bytes)]


def markdown(results: dict[str, Comparison], errors: dict[str, dict[str, Any]]) -> str:
    """The table of all models, and the causes of casts above autocast's, as in the docs."""
    head = "| model | ours | kB | greedy kB | autocast | kB | weights | kB | autocast | kB "
    lines = [f"{head}| low % | gradient error | to autocast's |", f"|---|{'--:|' * 12}"]
    for name, r in results.items():
        ours, autocast = cast_cells(r.ours), cast_cells(r.autocast)
        greedy = kilobytes(r.greedy_cast_bytes - r.ours.weight_bytes)
        cells = [*ours[:2], greedy, *autocast[:2], *ours[2:], *autocast[2:]]
        if found := errors.get(name):
            cells += [f"{100 * found['low_share']:.0f}", f"{100 * found['gradient_error']:.2f} %"]
            cells += [f"{found['gradient_ratio']:.2f}"]
        mark = " ^" if r.ours.bytes > r.autocast.bytes else ""
        lines.append(f"| {name}{mark} | {' | '.join(cells)} |")
    causes: dict[str, dict[str, int]] = {}
    for name, r in results.items():
        for cause, size in excess(r.ours, r.autocast).items():
            if r.ours.bytes > r.autocast.bytes:
                causes.setdefault(cause, {})[name] = size
    lines += ["", "| cause | models, kB |", "|---|---|"]
    for cause, models in causes.items():
        spelled = [f"{n} {kilobytes(b)}" for n, b in sorted(models.items(), key=lambda p: -p[1])]
        lines.append(f"| {cause} | {', '.join(spelled)} |")
    return "\n".join(lines) + "\n"


def kilobytes(count: int) -> str:
    return f"{count / 1e3:.1f}"


def why_above(r: Comparison) -> str:
    """What the excess consists of, most bytes first; empty where there is none."""
    if r.ours.bytes <= r.autocast.bytes:
        return "(more casts, fewer bytes)" if r.ours.count > r.autocast.count else ""
    top = list(excess(r.ours, r.autocast).items())[:REASONS_SHOWN]
    parts = [f"{op} {kilobytes(size)}" for op, size in top]
    rest = unexplained(r.ours, r.autocast)
    return ", ".join(parts) + (f"; unexplained {kilobytes(rest)}" if rest > 0 else "")


def summary(results: dict[str, Comparison]) -> list[str]:
    found = results.values()
    held = sum(r.moved <= r.greedy_moved for r in found)
    fewer = sum(r.moved < r.greedy_moved for r in found)
    bytes_above = sum(r.ours.bytes > r.autocast.bytes for r in found)
    casts_above = sum(r.ours.count > r.autocast.count for r in found)
    dark = [n for n, r in results.items() if unexplained(r.ours, r.autocast) > 0]
    total = sum(r.ours.bytes for r in found) / max(sum(r.autocast.bytes for r in found), 1)
    sizes = {name: sum(r.ours.by_op[name] for r in found) for name in REASONS}
    reasons = {name: f"{kilobytes(size)} kB" for name, size in sizes.items() if size}
    unreplayed = sum((r.autocast.unreplayed for r in found), Counter())
    ours, autocast = Casts(), Casts()
    for r in found:
        ours += r.ours
        autocast += r.autocast
    return [
        f"all models: ours {' '.join(cast_cells(ours))}, autocast {' '.join(cast_cells(autocast))} "
        "(casts, kB, casts of weights, kB); moved "
        f"{kilobytes(sum(r.moved for r in found))} kB, by the greedy fill "
        f"{kilobytes(sum(r.greedy_moved for r in found))} kB, its casts "
        f"{kilobytes(sum(r.greedy_cast_bytes for r in found))} kB",
        f"bytes moved: at most greedy's in {held} of {len(found)} models, fewer in {fewer}",
        f"above autocast: {bytes_above} models in cast bytes, {casts_above} in casts; all cast "
        f"bytes together are {total:.2f} times autocast's",
        f"of ours, what autocast does without: {reasons}",
        f"unexplained: {', '.join(dark) or 'none'}",
        f"replayed by rule, having no fake kernel without a GPU: {dict(unreplayed) or 'none'}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help="names of cases; default all")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the docs' tables")
    parser.add_argument("--errors", type=Path, metavar="JSON", help="of model_report.py, for them")
    options = parser.parse_args()

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    console = Console(width=None if sys.stdout.isatty() else 170)
    cases = {c.name: c for c in zoo.cases()}
    if unknown := set(options.models) - set(cases):
        console.print(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(cases)}")
        return 2
    results, failed = {}, {}
    for name in track(options.models or list(cases), "models", console=console, transient=True):
        torch._dynamo.reset()
        try:
            results[name] = compare(cases[name].make(), *cases[name].batch(0, 0))
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
        gc.collect()
    console.print(table_of(results))
    if options.markdown:
        errors = json.loads(options.errors.read_text()) if options.errors else []
        tables = markdown(results, {e["name"]: e for e in errors})
        options.markdown.write_text(tables, encoding="utf-8")
    for line in summary(results):
        console.print(line, highlight=False)
    for name, r in results.items():
        for reason in r.fallbacks:
            console.print(f"[red]{name}[/]: left original: {reason}", highlight=False)
    for name, reason in failed.items():
        console.print(f"[red]{name}[/]: failed: {reason}", highlight=False)
    return int(bool(failed) or any(r.moved > r.greedy_moved for r in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
