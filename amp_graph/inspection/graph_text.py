"""An annotated graph as code-like text: one line per node.

    colour  math      storage   node                           shape     module  line      why
    ------  --------  --------  -----------------------------  --------  ------  --------  ---------------
            cast      bfloat16  x_bfloat16 = cast(x)           (64, 32)                    x for fc
    allow   bfloat16  bfloat16  fc = aten.linear(x_bfloat16)   (64, 10)  fc      net.py:9  listed: matmul

`render` shows a plan alone; this shows the graph that runs, so it has storage precisions and the
casts where they are.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterator

from amp_graph.inspection.annotated import AnnotatedGraph, AnnotatedNode
from amp_graph.inspection.spelling import aligned, byte_count, count, graph_title, line_of

HEADINGS = ("colour", "math", "storage", "node", "shape", "module", "line", "why")
CALL_WIDTH = 84  # longer calls are cut to this many columns


def graph_text(graph: AnnotatedGraph) -> str:
    """The graph and, below it, those inside its higher-order operators; ends in a newline."""
    return "\n\n".join("\n".join(_lines(g)).rstrip() for g in graph.everything()) + "\n"


def _lines(graph: AnnotatedGraph) -> Iterator[str]:
    casts = [n.bytes for n in graph.nodes if n.makes_copy]
    moved = f", {count(len(casts), 'cast')} moving {byte_count(sum(casts))}" if casts else ""
    nodes = sum(n.kind != "cast" for n in graph.nodes)  # as a plan counts them
    yield f"{graph_title(graph.name)} in {graph.dtype}: {count(nodes, 'node')}{moved}"
    if graph.fallback:
        yield f"  {graph.fallback}"
    if graph.uncompiled:
        yield f"  runs operator by operator: {graph.uncompiled}"
    if graph.unlisted:
        yield f"  on no list: {', '.join(graph.unlisted)}"
    labels = {n.name: n.label for n in graph.nodes}
    rows = [_cells(n, labels) for n in graph.nodes]
    if rows:
        yield ""
    yield from aligned(HEADINGS, rows)


def _cells(node: AnnotatedNode, labels: dict[str, str]) -> tuple[str, ...]:
    math = "cast" if node.kind == "cast" else node.math
    line = line_of(node.source)
    text = call(node, labels)
    text = text if len(text) <= CALL_WIDTH else f"{text[: CALL_WIDTH - 4]}...)"
    return node.color, math, node.storage, text, node.shape, node.module, line, node.why


def call(node: AnnotatedNode, labels: dict[str, str]) -> str:
    """The node as a line of code, with parameters by their path in the model."""
    if node.kind not in ("operator", "cast", "output"):
        return f"{node.label} = {node.kind}"
    numbers = [f"{number:g}" for number in node.numbers]
    operands = ", ".join([*(labels.get(o, o) for o in node.operands), *numbers])
    if node.kind == "output":
        return f"return {operands}"
    operator = "cast" if node.is_cast else node.op
    return f"{node.label} = {operator}({operands})"
