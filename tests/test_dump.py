"""Dumps: golden texts of six small models, and files that are complete and well formed.

`EXPECTTEST_ACCEPT=1` renews the texts in golden/inspection.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import xml.etree.ElementTree
from collections import Counter
from pathlib import Path

import jsonschema
import pytest
import torch
from small_models import SMALL, Odd
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import amp_graph
from amp_graph import AmpGraphError, Policy
from amp_graph.inspection.formats import graph_dot, graph_json, graph_schema
from amp_graph.inspection.graph_text import graph_text
from amp_graph.inspection.source import annotated_model
from amp_graph.plans.matching import fingerprint

GOLDEN = Path(__file__).parent / "golden" / "inspection"
SCHEMA = Path(__file__).parent.parent / "docs" / "graph.schema.json"


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def converted(name: str, dtype: str = "bfloat16") -> nn.Module:
    model = amp_graph.convert(SMALL[name].make(), policy=dtype)
    model(*SMALL[name].inputs)
    return model


@pytest.mark.parametrize("name", SMALL)
def test_golden_text(name: str) -> None:
    model = annotated_model(converted(name))
    text = graph_text(model.before[0]) + "\n" + graph_text(model.after[0])
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path} shows something else; EXPECTTEST_ACCEPT=1 renews it"


@pytest.mark.parametrize("name", SMALL)
def test_every_node_of_the_emitted_graph_is_there_once_with_a_reason(name: str) -> None:
    model = converted(name)
    graphs = annotated_model(model).after[0].everything()
    _, emitted = model.__dict__["_call_impl"].compiler.graphs[0]
    emitted_graphs = [emitted, *(m for m in emitted.children() if hasattr(m, "graph"))]
    for graph, ran in zip(graphs, emitted_graphs, strict=True):
        assert Counter(n.name for n in graph.nodes) == Counter(n.name for n in ran.graph.nodes)
        for node in graph.nodes:
            assert node.why and node.chain and all(r.text for r in node.chain), node
            assert {r.node for r in node.chain} <= {n.name for n in graph.nodes}
    for node in graphs[0].nodes:
        assert len(graph_text(graphs[0]).split(f"\n{node.color:<7}")) > 1 or node.kind == "cast"


@pytest.mark.parametrize("name", SMALL)
def test_json_validates_against_its_schema(name: str) -> None:
    model = annotated_model(converted(name))
    for graph in (*model.before, *model.after):
        table = json.loads(json.dumps(graph_json(graph), allow_nan=False))
        jsonschema.validate(table, graph_schema())


def test_the_schema_document_is_the_one_of_the_code() -> None:
    text = json.dumps(graph_schema(), indent=2) + "\n"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        SCHEMA.write_text(text)
    assert SCHEMA.read_text() == text, "EXPECTTEST_ACCEPT=1 renews docs/graph.schema.json"
    jsonschema.Draft202012Validator.check_schema(graph_schema())


def test_the_files_of_a_dump(tmp_path: Path) -> None:
    model, told = converted("checkpointed"), []
    written = amp_graph.dump(
        model, tmp_path / "new" / "folder", progress=lambda name, i, n: told.append((name, i, n))
    )
    kinds = ["txt", "json", "dot"] + (["svg"] if shutil.which("dot") else [])
    sides = [f"graph0.{side}.{kind}" for side in ("after", "before") for kind in kinds]
    expected = {"index.html", "plan.json", "model_explorer.json", *sides}
    assert {p.name for p in written} == expected == {name for name, _, _ in told}
    assert [i for _, i, _ in told] == list(range(len(told))) and told[0][2] == len(told)
    assert {p.name for p in (tmp_path / "new" / "folder").iterdir()} == expected
    assert amp_graph.load_plan(tmp_path / "new" / "folder" / "plan.json") == amp_graph.plans(model)


def test_a_used_folder_keeps_no_graphs_of_another_dump(tmp_path: Path) -> None:
    old = {"graph0.after.svg", "graph1.before.txt", "graph12.after.json", "graph1.after.dot"}
    mine = {"graph1.txt", "graph01.after.txt", "my graph1.after.txt", "graph1.after.txt.bak"}
    for name in old | mine:
        (tmp_path / name).write_text("before")
    (tmp_path / "graph2.after.txt").mkdir()
    written = amp_graph.dump(converted("classifier"), tmp_path)
    there = {path.name for path in tmp_path.iterdir()}
    assert there == {path.name for path in written} | mine | {"graph2.after.txt"}
    assert all((tmp_path / name).read_text() == "before" for name in mine)


# The fields of ai-edge-model-explorer 0.1.34, which loads one collection. Its Python classes do not
# have textColor, its page does.
EXPLORER_NODE = {"id", "label", "namespace", "subgraphIds", "attrs", "incomingEdges", "style"}
EXPLORER_NODE |= {"outputsMetadata", "inputsMetadata", "config"}
EXPLORER_STYLE = {"backgroundColor", "textColor", "borderColor", "hoveredBorderColor"}


def test_model_explorer_edges_lead_to_nodes_and_nodes_to_their_bodies(tmp_path: Path) -> None:
    amp_graph.dump(converted("checkpointed"), tmp_path)
    collection = json.loads((tmp_path / "model_explorer.json").read_text())
    assert collection.keys() == {"label", "graphs"}
    assert collection["label"] == "Checkpointed"
    names = {graph["id"] for graph in collection["graphs"]}
    assert {"graph0 before", "graph0 after"} < names and len(names) == 4
    for graph in collection["graphs"]:
        ids = [node["id"] for node in graph["nodes"]]
        assert len(set(ids)) == len(ids)
        for node in graph["nodes"]:
            assert {e["sourceNodeId"] for e in node["incomingEdges"]} <= set(ids)
            assert node.keys() <= EXPLORER_NODE and node["style"].keys() <= EXPLORER_STYLE
    entered = [(g["id"], *n["subgraphIds"]) for g in collection["graphs"] for n in g["nodes"]]
    assert {tuple(ids) for ids in entered if len(ids) > 1} == {
        ("graph0 before", "graph0.wrap_body_0 before"),
        ("graph0 after", "graph0.wrap_body_0 after"),
    }


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz's dot")
def test_graphviz_reads_odd_names(tmp_path: Path) -> None:
    model = amp_graph.convert(Odd(), policy="bfloat16")
    model(torch.zeros(4, 8))
    amp_graph.dump(model, tmp_path)
    drawing = xml.etree.ElementTree.parse(tmp_path / "graph0.after.svg")
    text = " ".join(drawing.getroot().itertext())
    assert "back\\slash'" in text and '"];}<b>&amp;' in text
    dot = graph_dot(annotated_model(converted("checkpointed")).after[0])
    subprocess.run(["dot", "-Tplain"], input=dot, text=True, check=True, capture_output=True)


def test_a_graph_left_as_captured_is_dumped_with_the_reason(tmp_path: Path) -> None:
    model = converted("classifier")
    with pytest.warns(amp_graph.ConversionWarning):
        model.__dict__["_call_impl"].compiler.record.fall_back(0, "planted <b>")
    amp_graph.dump(model, tmp_path)
    assert "runs as captured: planted <b>" in (tmp_path / "graph0.after.txt").read_text()
    assert "cast" not in (tmp_path / "graph0.after.txt").read_text().partition("why")[2]
    assert "planted <b>" not in (tmp_path / "index.html").read_text()


def test_a_node_that_is_called_like_its_group_is_not_the_reason_of_others() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).softmax(-1).softmax(-1)

    model = amp_graph.convert(Twice(), policy=Policy("bfloat16", level="safe"))
    model(torch.zeros(4, 8))
    nodes = {n.name: n for n in annotated_model(model).after[0].nodes}
    assert {"softmax", "softmax_1"} <= nodes.keys()
    assert [r.node for r in nodes["softmax_1"].chain] == ["softmax_1"]


class CheckpointedAttention(nn.Module):
    """Its dropout makes PyTorch take the kernel that computes in float32 inside."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).unsqueeze(1).chunk(3, dim=-1)
        return scaled_dot_product_attention(query, key, value, dropout_p=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def test_before_and_after_are_the_same_nodes_where_attention_is_split() -> None:
    """In a graph inside of another as well."""
    model = amp_graph.convert(CheckpointedAttention(), policy="bfloat16")
    x = torch.randn(2, 4, 8)
    model(x)
    shown = annotated_model(model)
    (before,), (after,) = shown.before, shown.after
    (body,), (rewritten_body,) = before.bodies.values(), after.bodies.values()
    names = [node.name for node in body.nodes]
    assert sum("product_attention" in name for name in names) > 4
    assert names == [node.name for node in rewritten_body.nodes if node.name in names]
    assert not any(node.kind == "cast" for node in body.nodes)
    compared = {node.node for node in amp_graph.compare(model, (x,)).nodes}
    assert any(name.endswith("product_attention_matmul") for name in compared)


def test_plans_that_were_not_seen_stay_in_the_file_that_is_followed(tmp_path: Path) -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))

    model, x = amp_graph.convert(net(), policy="bfloat16"), torch.randn(4, 8)
    for mode in (True, False):
        model.train(mode)(x)
    amp_graph.dump(model, tmp_path)
    plans = amp_graph.load_plan(tmp_path / "plan.json")
    assert len(plans) == 2
    again = amp_graph.convert(net().eval(), plan=tmp_path / "plan.json")
    again(x)
    amp_graph.dump(again, tmp_path)
    assert {*map(fingerprint, amp_graph.load_plan(tmp_path / "plan.json"))} == {
        *map(fingerprint, plans)
    }
    amp_graph.dump(again, tmp_path / "other")
    assert len(amp_graph.load_plan(tmp_path / "other" / "plan.json")) == 1


def test_a_plan_that_no_dump_wrote_is_not_overwritten(tmp_path: Path) -> None:
    model, file = converted("classifier"), tmp_path / "plan.json"
    amp_graph.save_plan(amp_graph.plans(model), file)
    before = file.read_text()
    with pytest.raises(AmpGraphError, match=r"plan\.json: was not written by a dump"):
        amp_graph.dump(model, tmp_path)
    assert [*tmp_path.iterdir()] == [file] and file.read_text() == before
    follows = amp_graph.convert(SMALL["classifier"].make(), plan=file)
    follows(*SMALL["classifier"].inputs)
    amp_graph.dump(follows, tmp_path)
    assert len(amp_graph.load_plan(file)) == 1
