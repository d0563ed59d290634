"""A self-contained HTML page for a model: it needs no network and no server.

All data is one JSON object in the page, escaped so that no name can end it or become markup, and
the script only ever sets text, so a module called `<script>` is shown and not run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from amp_graph.inspection.annotated import AnnotatedGraph, AnnotatedNode
from amp_graph.inspection.graph_text import call
from amp_graph.inspection.report import Figures, report_data
from amp_graph.inspection.source import AnnotatedModel
from amp_graph.inspection.spelling import byte_count, flop_count, line_of, percent, plural
from amp_graph.inspection.template import template
from amp_graph.plans.plain_json import encode


def page(model: AnnotatedModel) -> str:
    """The page as HTML."""
    return template("page.html").render(
        name=model.name, dtype=model.dtype, tiles=_tiles(model), data=_data(model)
    )


def _data(model: AnnotatedModel) -> dict[str, Any]:
    graphs = [
        {"before": _graph(before), "after": _graph(after)}
        for pair in zip(model.before, model.after, strict=True)
        for before, after in zip(*(g.everything() for g in pair), strict=False)
    ]
    return {"model": model.name, "graphs": graphs, "breaks": model.breaks}


def _graph(graph: AnnotatedGraph) -> dict[str, Any]:
    """A graph with the names of those inside it."""
    labels = {n.name: n.label for n in graph.nodes}
    table: dict[str, Any] = encode(replace(graph, nodes=(), bodies={}))
    table["nodes"] = [encode(n) | _spelled(n, labels) for n in graph.nodes]
    table["bodies"] = [body.name for body in graph.bodies.values()]
    return table


def _spelled(node: AnnotatedNode, labels: dict[str, str]) -> dict[str, str]:
    """Return the texts that the page only shows, spelled as in all views."""
    return {
        "call": call(node, labels),
        "line": line_of(node.source),
        "bytes": byte_count(node.bytes) if node.bytes else "",
        "flops": flop_count(node.flops) if node.flops else "",
    }


def _tiles(model: AnnotatedModel) -> list[tuple[str, str, str]]:
    """Return the tiles at the top of the page: a figure, its subject, and a note."""
    data = report_data(model, suggest=False)
    whole: Figures = data.modules[0].figures
    on_tensors = f"on {model.dtype} tensors"
    shares = (
        (whole.operators, "operators", on_tensors),
        (whole.flops, "FLOPs", on_tensors),
        (whole.bytes, "activation bytes", f"in {model.dtype}"),
    )
    tiles = [(percent(s.low, s.total), f"of {name}", where) for s, name, where in shares]
    moved = byte_count(sum(cast.bytes for cast in data.casts))
    tiles.append((str(len(data.casts)), "casts", f"moving {moved}"))
    for number, noun in ((len(data.fallbacks), "fallback"), (len(data.breaks), "graph break")):
        if number:
            tiles.append((str(number), plural(number, noun), ""))
    return tiles
