"""Set the casts of every model of the test zoo beside autocast's and beside a greedy fill.

    python scripts/placement_report.py              all
    python scripts/placement_report.py gpt2 t5      some

One forward each. "ours" and "autocast" count the casts between float32 and bfloat16 and their
bytes read and written, autocast by CUDA's rules on the same captured graphs (no GPU needed).
"greedy" is the fill of TensorFlow's grappler on our painted colours; "moved" adds to the casts
what operators that were free to be low move in float32.

A model above autocast says why: what our casts are for that autocast's are not. Autocast returns
low-precision outputs where ours stay float32, and leaves promotion to kernels that read mixed
operands; `grappler.REASONS` holds all such reasons. The rest is shown as unexplained.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import zoo
from grappler import REASONS, Comparison, compare, excess, unexplained

REASONS_SHOWN = 3


def table_of(results: dict[str, Comparison]) -> Table:
    table = Table(title="casts of one forward, beside CUDA autocast and a greedy fill")
    table.add_column("model")
    for column in ("ours", "kB", "autocast", "kB", "moved kB", "greedy kB", "greedy moved kB"):
        table.add_column(column, justify="right")
    table.add_column("above autocast because of (kB)")
    for name, r in results.items():
        numbers = [r.moved, r.greedy_cast_bytes, r.greedy_moved]
        table.add_row(
            name,
            f"{r.ours.count}",
            kilobytes(r.ours.bytes),
            f"{r.autocast.count}",
            kilobytes(r.autocast.bytes),
            *map(kilobytes, numbers),
            why_above(r),
            style="red" if r.moved > r.greedy_moved or unexplained(r.ours, r.autocast) > 0 else "",
        )
    return table


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
    reasons = {name: sum(r.ours.by_op[name] for r in found) for name in REASONS}
    reasons = {name: f"{kilobytes(size)} kB" for name, size in reasons.items() if size}
    refused = {n: r.refused for n, r in results.items() if r.refused}
    unreplayed = sum((r.autocast.unreplayed for r in found), Counter())
    return [
        f"bytes moved: at most greedy's in {held} of {len(found)} models, fewer in {fewer}",
        f"above autocast: {bytes_above} models in cast bytes, {casts_above} in casts; all cast "
        f"bytes together are {total:.2f} times autocast's",
        f"of ours, what autocast does without: {reasons}",
        f"unexplained: {', '.join(dark) or 'none'}",
        f"chosen to be low, then refused: {refused or 'none'}",
        f"replayed by rule, having no fake kernel without a GPU: {dict(unreplayed) or 'none'}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help="names of cases; default all")
    options = parser.parse_args()

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    console = Console()
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
