"""A comparison as a table and as a drawing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from amp_graph.inspection.spelling import line_of, percent
from amp_graph.inspection.template import template
from amp_graph.inspection.terminal import columns, without_colors
from amp_graph.numerics.compare import Comparison, NodeNumerics
from amp_graph.numerics.statistics import Statistics

WIDTH = 120  # of the plain text
WIDE = 110  # with less, the range and the dtype are left out
LINE_WIDTH = 20
SHOWN = 12
NAMED = {"loss": "the loss"}
# float16: normal numbers from 2^-14 to just below 2^16, subnormal ones down to 2^-24.
NORMAL, SUBNORMAL, LARGEST = -14, -24, 15


def text(comparison: Comparison) -> str:
    """The table without colours."""
    return without_colors(table(comparison, WIDTH), WIDTH)


def table(comparison: Comparison, width: int) -> RenderableType:
    """The errors of the whole, the worst nodes, and the gradients that do not fit float16; with
    fewer columns where `width` is small."""
    scale = f", loss scale {comparison.loss_scale:g}" if comparison.loss_scale != 1 else ""
    parts: list[RenderableType] = [
        Text(f"{comparison.model}: {comparison.dtype} against float32{scale}", style="bold"),
        Text(
            f"error of outputs {_error(comparison.outputs)}, of the loss "
            f"{_error(comparison.loss)}, of gradients {_error(comparison.gradients)}"
        ),
    ]
    if not_compared := _not_compared(comparison):
        parts.append(Text(not_compared))
    if comparison.nothing:
        parts.append(Text(f"Nothing was converted: {comparison.nothing}."))
    first = comparison.first_above(torch.finfo(getattr(torch, comparison.dtype)).eps)
    if first is not None:
        line = line_of(first.source)
        parts.append(
            Text(f"first value off by more than {comparison.dtype}'s epsilon: {first.label} {line}")
        )
    worst = [n for n in comparison.worst(SHOWN) if n.badness > (False, 0.0, 0.0)]
    if worst:
        parts += [Text("\nWorst nodes", style="bold"), Padding(_nodes(worst, width), (0, 0, 0, 2))]
    lost = comparison.underflows(SHOWN // 2)
    if lost:
        parts += [
            Text("\nMost underflow", style="bold"),
            Padding(_nodes(lost, width), (0, 0, 0, 2)),
        ]
    if comparison.fallbacks:
        lines = Text("\n".join(comparison.fallbacks))
        parts += [Text("\nFallbacks", style="bold"), Padding(lines, (0, 0, 0, 2))]
    if comparison.gradient_exponents:
        parts.append(Text(f"\n{_gradients(comparison)}"))
    return Group(*parts)


def _not_compared(comparison: Comparison) -> str:
    """What of the outcome is not, or ""."""
    shares = comparison.not_finite.items()
    named = (f"{percent(share, 1)} of {NAMED.get(what, what)}" for what, share in shares)
    if found := ", ".join(named):
        return f"float32 itself is not finite in {found}: not compared"
    if math.isnan(comparison.outputs):
        return "no floating-point tensor is returned: of the outcome nothing is compared"
    return ""


def _nodes(nodes: Sequence[NodeNumerics], width: int) -> Table:
    shown = COLUMNS if width >= WIDE else [c for c in COLUMNS if c.always]
    found = columns(
        *(c.heading for c in shown),
        right={i for i, c in enumerate(shown) if c.right},
        whole={i for i, c in enumerate(shown) if not c.folds},
    )
    for node in nodes:
        found.add_row(*(Text(column.cell(node)) for column in shown))
    return found


def _error(error: float) -> str:
    if math.isnan(error):  # nothing to compare
        return "–"
    return "infinite" if error == math.inf else f"{error:.2g}"


def _range(s: Statistics) -> str:
    return "–" if s.smallest is None else f"2^{s.smallest}..2^{s.largest} ({s.bits} bits)"


def _backward(s: Statistics | None) -> str:
    if s is None:
        return "–"
    lost = [f"{percent(s.overflow, 1)} over"] if s.overflow else []
    lost += [f"{percent(s.underflow, 1)} under"] if s.underflow else []
    return " ".join([_error(s.error), *lost])


def _line(source: str) -> str:
    """File and line number, of a long name the end."""
    line = line_of(source)
    return line if len(line) <= LINE_WIDTH else f"…{line[1 - LINE_WIDTH :]}"


def _gradients(comparison: Comparison) -> str:
    counts = comparison.gradient_exponents
    total = sum(counts.values())
    below = sum(n for e, n in counts.items() if e < SUBNORMAL)
    subnormal = sum(n for e, n in counts.items() if SUBNORMAL <= e < NORMAL)
    above = sum(n for e, n in counts.items() if e > LARGEST)
    return (
        f"Gradients in float32 times the loss scale: 2^{min(counts)} to 2^{max(counts)}. In "
        f"float16 {percent(below, total)} would be zero, {percent(subnormal, total)} lose digits, "
        f"{percent(above, total)} overflow; {comparison.gradient_zeros:,} more are zero anyway."
    )


@dataclass(frozen=True)
class Column:
    """One column of the table of nodes. One that folds takes two lines where there is no room."""

    heading: str
    cell: Callable[[NodeNumerics], str]
    right: bool = False
    always: bool = True
    folds: bool = False


COLUMNS = (
    Column("node", lambda n: n.label, folds=True),
    Column("dtype", lambda n: n.dtype, always=False),
    Column("error", lambda n: _error(n.forward.error), right=True),
    Column("added", lambda n: _error(n.added), right=True),
    Column("over", lambda n: percent(n.forward.overflow, 1), right=True),
    Column("under", lambda n: percent(n.forward.underflow, 1), right=True),
    Column("range", lambda n: _range(n.forward), always=False),
    Column("gradient", lambda n: _backward(n.backward)),
    Column("line", lambda n: _line(n.source)),
)


def histogram(comparison: Comparison) -> str:
    """The gradients by exponent of 2 as SVG, with float16's range marked.

    (The presentation is that of Micikevicius et al., Mixed Precision Training, 2018, figure 3.)
    """
    counts = comparison.gradient_exponents
    total = sum(counts.values()) or 1
    low = min([SUBNORMAL - 6, *counts])
    high = max([LARGEST + 3, *counts])
    highest = max(counts.values(), default=1) / total
    bars = [(e, counts.get(e, 0) / total) for e in range(low, high + 1)]
    return template("histogram.svg", "numerics").render(
        comparison=comparison,
        bars=bars,
        low=low,
        high=high,
        highest=highest,
        normal=NORMAL,
        subnormal=SUBNORMAL,
        largest=LARGEST,
        summary=_gradients(comparison) if counts else "No gradients.",
    )
