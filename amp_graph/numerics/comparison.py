"""The result of `compare`: figures, a table and a drawing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from amp_graph.errors import AmpGraphError
from amp_graph.files import as_path, write_whole
from amp_graph.inspection.spelling import line_of, percent
from amp_graph.inspection.template import template
from amp_graph.inspection.terminal import Shown, columns, section
from amp_graph.numerics.node_numerics import NodeNumerics
from amp_graph.numerics.outputs import check_bound
from amp_graph.numerics.statistics import Statistics
from amp_graph.plans.plain_json import encode

FORMAT = "amp_graph comparison"
SCHEMA = 1
WIDE = 110  # with less, the module, the dtype and the range are left out
LINE_WIDTH = 20
SHOWN = 12
NAMED = {"loss": "the loss"}
BREAKS = "Graph breaks: code between graphs ran in float32, and was not looked into"
# float16: normal numbers from 2^-14 to just below 2^16, subnormal ones down to 2^-24.
NORMAL, SUBNORMAL, LARGEST = -14, -24, 15


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """The result of `compare`.

    nodes: in order of execution. outputs, loss, gradients: relative errors of the model's outputs,
    its loss and the gradients of its parameters; infinite where one is not finite, NaN where there
    is none to compare. not_finite: the share of "outputs", "loss" and "gradients" that is not
    finite in float32 itself, and so is not compared.
    fallbacks: the graphs and bodies that run otherwise than asked, and why; of those that were not
    looked into there are no nodes. breaks: where graphs ended, and why; code between them runs in
    float32 here, and is not looked into. nothing: why nothing was converted, if so.
    gradient_exponents: how many gradients (of values and parameters, float32 run, multiplied by
    the loss scale) have each exponent of 2.
    """

    model: str
    dtype: str
    loss_scale: float
    outputs: float
    loss: float
    gradients: float
    nodes: tuple[NodeNumerics, ...]
    gradient_exponents: Mapping[int, int] = field(default_factory=dict)
    gradient_zeros: int = 0
    fallbacks: tuple[str, ...] = ()
    nothing: str = ""
    not_finite: Mapping[str, float] = field(default_factory=dict)
    breaks: tuple[str, ...] = ()

    def within(self, bound: float) -> bool:
        """Whether the errors of outputs and gradients, as far as there are any, are at most
        `bound`. Not if there are none, or float32 itself has gradients that are not finite. Raises
        AmpGraphError for a bound that is negative or not a number."""
        check_bound(bound)
        sides = {"outputs": self.outputs, "gradients": self.gradients}
        errors = [e for side, e in sides.items() if side in self.not_finite or not math.isnan(e)]
        is_sound = bool(errors) and "gradients" not in self.not_finite
        return is_sound and all(error <= bound for error in errors)

    def worst(self, count: int = 10) -> tuple[NodeNumerics, ...]:
        """The nodes that do the most harm, worst first."""
        return tuple(sorted(self.nodes, key=lambda n: n.badness, reverse=True)[:count])

    def underflows(self, count: int = 10) -> tuple[NodeNumerics, ...]:
        """The nodes with the largest share of values or gradients that became zero."""
        lost = [n for n in self.nodes if n.underflow > 0]
        return tuple(sorted(lost, key=lambda n: n.underflow, reverse=True)[:count])

    def first_above(self, bound: float) -> NodeNumerics | None:
        """The first node in order of execution whose value is off by more than `bound`. Raises
        AmpGraphError for a bound that is negative or not a number."""
        check_bound(bound)
        return next((n for n in self.nodes if n.forward.error > bound), None)

    def save(self, path: str | Path) -> None:
        """Write all figures as JSON. Raises AmpGraphError if the file cannot be written."""
        table = {"format": FORMAT, "schema": SCHEMA, **encode(self)}
        write_whole(path, json.dumps(table, indent=1) + "\n")

    def plot(self, path: str | Path) -> None:
        """Draw the histogram of gradient exponents as SVG, with float16's range marked. Raises
        AmpGraphError for a file of another kind, or that cannot be written."""
        check_drawing(path)
        write_whole(path, histogram(self))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield table(self, options.max_width)


def check_drawing(path: str | Path) -> None:
    """Refuse a file for `Comparison.plot` that is to be of another kind. Raises AmpGraphError."""
    if as_path(path).suffix.lower() not in ("", ".svg"):
        raise AmpGraphError(f"{path}: the drawing is SVG; give a file that ends in .svg")


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
        parts.append(section("Worst nodes", _nodes(worst, width)))
    lost = comparison.underflows(SHOWN // 2)
    if lost:
        parts.append(section("Most underflow", _nodes(lost, width)))
    for title, told in (("Fallbacks", comparison.fallbacks), (BREAKS, comparison.breaks)):
        if told:
            parts.append(section(title, Text("\n".join(told))))
    if comparison.gradient_exponents:
        parts.append(Text(f"\n{_gradients(comparison)}"))
    return Group(*parts)


def _not_compared(comparison: Comparison) -> str:
    """Return the part of the outcome that is not compared, and why; "" if all is."""
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
    return "–" if s.smallest is None else f"2^{s.smallest}..2^{s.largest}"


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
    """A column of the table of nodes. A column that folds takes two lines where there is no
    room."""

    heading: str
    cell: Callable[[NodeNumerics], str]
    right: bool = False
    always: bool = True
    folds: bool = False


COLUMNS = (
    Column("node", lambda n: n.label, folds=True),
    Column("module", lambda n: n.module, always=False, folds=True),
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
