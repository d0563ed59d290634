"""An annotated graph for other programs: JSON, DOT, and Model Explorer's graph JSON.

Model Explorer (https://github.com/google-ai-edge/model-explorer) opens `model_explorer.json`
directly; modules become its layers. Graphviz draws the DOT files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from amp_graph.inspection.annotated import AnnotatedGraph, AnnotatedNode
from amp_graph.inspection.spelling import byte_count, flop_count
from amp_graph.plans.plain_json import describe, encode, schema

FORMAT = "amp_graph graph"
SCHEMA = 1

# Fill, and a text colour that reads well on it, by colour of the node; also in page.css.
FILLS = {
    "allow": ("#2563c9", "#ffffff"),
    "infer": ("#a9c8f5", "#0b2447"),
    "clear": ("#dfe6ee", "#22303f"),
    "deny": ("#f0a35e", "#3d1f02"),
    "keep": ("#f4f4f2", "#4a4a46"),
    "cast": ("#7c5cc4", "#ffffff"),
    "": ("#ffffff", "#22303f"),
}


def graph_json(graph: AnnotatedGraph) -> dict[str, Any]:
    """The graph as JSON objects; fields at their defaults are left out. The schema is
    `docs/graph.schema.json`."""
    return {"format": FORMAT, "schema": SCHEMA, "graph": encode(graph)}


def graph_schema() -> dict[str, Any]:
    """The JSON schema of what `graph_json` returns, as in `docs/graph.schema.json`."""
    definitions: dict[str, Any] = {}
    content = {"graph": describe(AnnotatedGraph, definitions)}
    return schema(FORMAT, SCHEMA, content, definitions)


def graph_dot(graph: AnnotatedGraph) -> str:
    """The graph and those inside it, in the DOT language."""
    lines = [f"digraph {_quoted(graph.name)} {{", "  rankdir=TB; ranksep=0.3; nodesep=0.2;"]
    lines.append('  node [shape=box, style="filled,rounded", color="#b8bec8"];')
    lines.append('  node [fontname="sans-serif", fontsize=10];')
    lines.append('  edge [color="#8a8f98", arrowsize=0.6];')
    for i, inner in enumerate(graph.everything()):
        lines += [f"  {line}" for line in _dot_cluster(inner, i)]
    return "\n".join([*lines, "}"]) + "\n"


def _dot_cluster(graph: AnnotatedGraph, index: int) -> Iterator[str]:
    inside = index > 0
    if inside:
        yield f'subgraph "cluster_{index}" {{ label={_quoted(graph.name)};'
    for node in graph.nodes:
        fill, ink = FILLS["cast" if node.kind == "cast" else node.color]
        label = "\n".join(t for t in (node.label, node.op, _types(node)) if t)
        yield (
            f"{_id(index, node.name)} [label={_quoted(label)}, fillcolor={_quoted(fill)}, "
            f"fontcolor={_quoted(ink)}, tooltip={_quoted(node.why or node.kind)}];"
        )
    for node in graph.nodes:
        for operand in node.operands:
            yield f"{_id(index, operand)} -> {_id(index, node.name)};"
    if inside:
        yield "}"


def _types(node: AnnotatedNode) -> str:
    return f"{node.storage} {node.shape}".strip()


def _id(index: int, name: str) -> str:
    return _quoted(f"{index}.{name}")


def _quoted(text: str) -> str:
    """A DOT string. Graphviz also reads HTML entities in it."""
    escaped = text.replace("&", "&amp;").replace("\\", "\\\\")
    escaped = escaped.replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def model_explorer(name: str, graphs: Iterable[tuple[str, AnnotatedGraph]]) -> dict[str, Any]:
    """All graphs as one collection of Model Explorer (its `graph_builder.GraphCollection`), each
    under the name given beside it; a node with bodies leads to their graphs."""

    def entry(graph: AnnotatedGraph, suffix: str) -> dict[str, Any]:
        bodies = {n: f"{body.name} {suffix}".strip() for n, body in graph.bodies.items()}
        nodes = [_explorer_node(n, bodies) for n in graph.nodes]
        return {"id": f"{graph.name} {suffix}".strip(), "nodes": nodes}

    entries = [entry(inner, suffix) for suffix, graph in graphs for inner in graph.everything()]
    return {"label": name, "graphs": entries}


def _explorer_node(node: AnnotatedNode, graph_ids: Mapping[str, str]) -> dict[str, Any]:
    """`graph_ids` names the bodies of the graph, by the node that holds each."""
    fill, ink = FILLS["cast" if node.kind == "cast" else node.color]
    facts = {
        "operator": node.op,
        "colour": node.color,
        "math precision": node.math,
        "why": node.why,
        "reasons": "\n".join(r.text for r in node.chain),
        "line": node.source,
        "code": node.code,
        "FLOPs": flop_count(node.flops) if node.flops else "",
        "bytes": byte_count(node.bytes) if node.bytes else "",
    }
    return {
        "id": node.name,
        "label": node.label,
        "namespace": node.module.replace(".", "/"),
        "incomingEdges": [
            {"sourceNodeId": operand, "sourceNodeOutputId": "0", "targetNodeInputId": str(i)}
            for i, operand in enumerate(node.operands)
        ],
        "attrs": [{"key": key, "value": value} for key, value in facts.items() if value],
        "outputsMetadata": [
            {"id": "0", "attrs": [{"key": "shape", "value": _types(node)}]},
        ],
        "subgraphIds": [graph_ids[o] for o in node.operands if o in graph_ids],
        "style": {"backgroundColor": fill, "textColor": ink},
    }
