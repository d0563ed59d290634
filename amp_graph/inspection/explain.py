"""`explain`: a short report on a converted model, for the terminal and for notebooks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from torch import nn

from amp_graph.errors import AmpGraphError
from amp_graph.files import write_whole
from amp_graph.inspection.report import (
    CastFigures,
    Figures,
    ModuleFigures,
    ReportData,
    report_data,
)
from amp_graph.inspection.source import annotated_model
from amp_graph.inspection.spelling import byte_count, count, flop_count, graph_title, percent
from amp_graph.inspection.template import template
from amp_graph.inspection.terminal import Shown, columns, section
from amp_graph.plans.plain_json import encode

CASTS_SHOWN = 8


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """The result of `explain`: `print` it, show it in a notebook, `save` it, or read `data`.

    depth: how many levels of modules to show.
    """

    data: ReportData
    depth: int = 3

    WIDTH: ClassVar[int] = 110

    def save(self, path: str | Path) -> None:
        """Write all figures as JSON. Raises AmpGraphError if the file cannot be written."""
        write_whole(path, json.dumps(encode(self.data), indent=1) + "\n")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from _parts(self.data, self.depth)

    def _repr_html_(self) -> str:
        return template("report.html").render(
            report=self.data,
            modules=shown_modules(self.data, self.depth),
            casts=self.data.casts[:CASTS_SHOWN],
            all=self.data.modules[0].figures,
            percent=lambda share: percent(share.low, share.total),
            byte_count=byte_count,
            flop_count=flop_count,
        )


def explain(model: nn.Module, *, depth: int = 3) -> Report:
    """Report what of a converted model runs in low precision, what the casts cost, and what could
    be changed. The model has to have run once.

    Raises AmpGraphError if the model is not converted, or has not run, or for a depth that is none.
    """
    if not isinstance(depth, int) or depth < 0:
        raise AmpGraphError(f"depth is how many levels of modules to show, not {depth!r}")
    return Report(report_data(annotated_model(model)), depth)


def shown_modules(data: ReportData, depth: int) -> list[ModuleFigures]:
    return [m for m in data.modules if _level(m) <= depth]


def _level(module: ModuleFigures) -> int:
    return len(module.path.split(".")) if module.path else 0


def _parts(data: ReportData, depth: int) -> Iterator[RenderableType]:
    yield Text(f"{data.model} in {data.dtype}", style="bold")
    yield Text(_in_one_line(data))
    if data.nothing:
        yield Text(f"Nothing was converted: {data.nothing}.")
    if data.modules[0].figures.operators.total:
        yield section("On low-precision tensors, by module", _module_table(data, depth))
    if len(data.graphs) > 1:
        yield section("Graphs", _graph_table(data))
    if data.casts:
        yield section(_cast_title(data), _cast_table(data.casts[:CASTS_SHOWN]))
    for title, lines in (
        ("On no list, so in float32", data.unlisted),
        ("Graph breaks", data.breaks),
        ("Fallbacks", data.fallbacks),
    ):
        if lines:
            yield section(title, Text("\n".join(lines)))
    yield section("Most rewarding changes", _suggestions(data))


def _in_one_line(data: ReportData) -> str:
    total = data.modules[0].figures
    operators, flops, stored = (
        percent(share.low, share.total) for share in (total.operators, total.flops, total.bytes)
    )
    return (
        f"{operators} of operators and {flops} of FLOPs on low-precision tensors, {stored} of "
        f"activation bytes in low precision; {count(len(data.graphs), 'graph')}{data.note}"
    )


def _cast_title(data: ReportData) -> str:
    total = sum(c.bytes for c in data.casts)
    title = f"Casts: {len(data.casts)}, moving {byte_count(total)}"
    return title if len(data.casts) <= CASTS_SHOWN else f"{title}; the largest"


def _module_table(data: ReportData, depth: int) -> Table:
    table = columns("module", "operators", "FLOPs", "", "activations", "", right=(1, 2, 3, 4, 5))
    for module in shown_modules(data, depth):
        name = module.path.rpartition(".")[2] if module.path else data.model
        figures = module.figures
        table.add_row(
            Padding(Text(name), (0, 0, 0, 2 * _level(module))),
            f"{figures.operators.low}/{figures.operators.total}",
            percent(figures.flops.low, figures.flops.total),
            flop_count(figures.flops.total),
            percent(figures.bytes.low, figures.bytes.total),
            byte_count(figures.bytes.total),
        )
    return table


def _graph_table(data: ReportData) -> Table:
    table = columns(
        "graph",
        "nodes",
        "operators",
        "FLOPs",
        "casts",
        "cast bytes",
        "begins at",
        right=range(1, 6),
    )
    for graph in data.graphs:
        figures: Figures = graph.figures
        table.add_row(
            graph_title(graph.name),
            str(graph.nodes),
            f"{figures.operators.low}/{figures.operators.total}",
            percent(figures.flops.low, figures.flops.total),
            str(graph.casts),
            byte_count(graph.cast_bytes),
            graph.line,
        )
    return table


def _cast_table(casts: tuple[CastFigures, ...]) -> Table:
    table = columns("value", "to", "bytes", "because", right=(2,))
    for cast in casts:
        table.add_row(Text(cast.value), cast.dtype, byte_count(cast.bytes), Text(cast.why))
    return table


def _suggestions(data: ReportData) -> RenderableType:
    if not data.suggestions:
        return Text(
            "None: what stays in float32 has a reason of its own, or its casts would cost more."
        )
    lines: list[RenderableType] = []
    for number, suggestion in enumerate(data.suggestions, 1):
        lines.append(Text(f"{number}. {suggestion.what}"))
        below = [f"would free {suggestion.gain}"] if suggestion.nodes else []
        lines += [Padding(Text(text), (0, 0, 0, 3)) for text in [*below, suggestion.how]]
    return Group(*lines)
