"""The figures of a report: how much of a model runs low, what it costs, what could be changed.

Shares are of what the captured graphs run once each: operators on float32 tensors, their
floating-point operations, and the bytes of the results that they store (views and in-place results
store none).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from amp_graph.dtypes import LOW_DTYPES
from amp_graph.inspection.annotated import AnnotatedGraph, AnnotatedNode
from amp_graph.inspection.source import AnnotatedModel
from amp_graph.inspection.spelling import graph_title, line_of
from amp_graph.inspection.suggestions import Suggestion, suggestions
from amp_graph.reasons import why_nothing_is_low
from amp_graph.sums import Summable


@dataclass(frozen=True)
class Share(Summable):
    """How much of something is in low precision; of operators and FLOPs, on tensors of it."""

    low: int = 0
    total: int = 0


@dataclass(frozen=True)
class Figures(Summable):
    """The figures of a subtree of modules. `bytes` counts what operators store."""

    operators: Share = Share()
    flops: Share = Share()
    bytes: Share = Share()


@dataclass(frozen=True)
class ModuleFigures:
    """The figures of a module with all below it; the path of the model itself is ""."""

    path: str
    figures: Figures


@dataclass(frozen=True)
class CastFigures:
    """A cast of a graph: the value, its new dtype, the bytes, and which reader needs it, and
    why."""

    graph: str
    value: str
    dtype: str
    bytes: int
    why: str


@dataclass(frozen=True)
class GraphFigures:
    """The figures of a graph. `casts` are not among its `nodes`. `fallback`: how it runs, if not as
    asked. `line`: that of its first operator."""

    name: str
    nodes: int
    figures: Figures
    casts: int
    cast_bytes: int
    fallback: str | None
    line: str = ""


@dataclass(frozen=True)
class ReportData:
    """Everything that `explain` says, as data. `nothing`: why nothing was converted, if so."""

    model: str
    dtype: str
    graphs: tuple[GraphFigures, ...]
    modules: tuple[ModuleFigures, ...]
    casts: tuple[CastFigures, ...]
    unlisted: tuple[str, ...]
    breaks: tuple[str, ...]
    fallbacks: tuple[str, ...]
    suggestions: tuple[Suggestion, ...]
    nothing: str = ""

    @property
    def note(self) -> str:
        """A note on what the figures leave out; "" if nothing."""
        uncaptured = any(not graph.nodes and graph.fallback for graph in self.graphs)
        return "; code that is not captured is not counted" if uncaptured else ""


def report_data(model: AnnotatedModel, suggest: bool = True) -> ReportData:
    """The figures of all graphs of a model together; what could be changed takes longest."""
    everything = [g for graph in model.after for g in graph.everything()]
    casts = sorted(_casts(everything), key=lambda c: -c.bytes)
    return ReportData(
        model=model.name,
        dtype=model.dtype,
        graphs=tuple(_graph(g) for g in model.after),
        modules=tuple(_modules(n for g in everything for n in g.nodes)),
        casts=tuple(casts),
        unlisted=tuple(sorted({op for g in everything for op in g.unlisted})),
        breaks=model.breaks,
        fallbacks=tuple(
            f"{graph_title(g.name)}: {why}"
            for g in everything
            for why in (g.fallback, g.uncompiled)
            if why
        ),
        suggestions=suggestions(model) if suggest else (),
        nothing=why_nothing_is_low(model.plans),
    )


def figures_of(node: AnnotatedNode) -> Figures:
    if not node.is_float:
        return Figures()
    low = int(node.low)
    stored_low = node.storage in LOW_DTYPES
    return Figures(
        operators=Share(low, 1),
        flops=Share(low * node.flops, node.flops),
        bytes=Share(node.bytes if stored_low else 0, node.bytes),
    )


def _graph(graph: AnnotatedGraph) -> GraphFigures:
    nodes = [n for g in graph.everything() for n in g.nodes]
    casts = [n.bytes for n in nodes if n.makes_copy]
    total = sum((figures_of(n) for n in nodes), Figures())
    captured = sum(n.kind != "cast" for n in nodes)
    line = next((line_of(n.source) for n in nodes if n.kind == "operator" and n.source), "")
    return GraphFigures(graph.name, captured, total, len(casts), sum(casts), graph.fallback, line)


def _modules(nodes: Iterable[AnnotatedNode]) -> Iterator[ModuleFigures]:
    """Every module that an operator is inside of, the model first, below it in order of use."""
    totals: dict[str, Figures] = {"": Figures()}
    for node in nodes:
        own = figures_of(node)
        if not own.operators.total:
            continue
        parts = node.module.split(".") if node.module else []
        for length in range(len(parts) + 1):
            path = ".".join(parts[:length])
            totals[path] = totals.get(path, Figures()) + own
    for path in _depth_first(totals):
        yield ModuleFigures(path, totals[path])


def _depth_first(paths: Iterable[str]) -> list[str]:
    children: dict[str, list[str]] = {}
    for path in paths:
        if path:
            children.setdefault(path.rpartition(".")[0], []).append(path)

    def below(path: str) -> Iterator[str]:
        yield path
        for child in children.get(path, ()):
            yield from below(child)

    return list(below(""))


def _casts(graphs: Iterable[AnnotatedGraph]) -> Iterator[CastFigures]:
    for graph in graphs:
        labels = {n.name: n.label for n in graph.nodes}
        for node in graph.nodes:
            if node.makes_copy:
                why = "; ".join(r.text for r in node.chain[1:-1])
                value = labels.get(node.value, node.value)
                yield CastFigures(graph.name, value, node.storage, node.bytes, why)
