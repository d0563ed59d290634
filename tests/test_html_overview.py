"""What the page of a model shows before a node is chosen."""

from __future__ import annotations

from pathlib import Path

from browsing import browser, work

from amp_graph.inspection.annotated import AnnotatedGraph, AnnotatedNode
from amp_graph.inspection.page import page
from amp_graph.inspection.source import AnnotatedModel


@browser
def test_the_page_opens_on_a_graph_with_nodes_beside_an_overview(tmp_path: Path) -> None:
    """Of an LSTM given a packed sequence the first graph has none: it runs under autocast."""
    add = AnnotatedNode("add", "add", "aten.add.Tensor", "operator", color="deny", why="promoted")
    empty = AnnotatedGraph("graph0", "bfloat16", (), fallback="runs under autocast: not captured")
    graphs = (empty, AnnotatedGraph("graph1", "bfloat16", (add,)))
    model = AnnotatedModel("Net", "bfloat16", (), graphs, graphs, ("net.py:3, print(x): why",))
    seen = work(
        page(model),
        """
        const panel = () => get("detail").innerText;
        seen.graphs = [...get("graph").options].map((o) => o.textContent);
        [seen.rows, seen.overview] = [shown(), panel()];
        seen.hint = document.querySelector("#rows .badge").parentElement.title;
        choose(view.byName.get("add"), true);
        seen.node = panel();
        button("#detail .link", "Overview").click();
        seen.again = panel();
        button("#detail .link", "graph0").click();
        seen.followed = get("graph").value;
        """,
        tmp_path,
    )
    assert seen["graphs"] == ["graph0 (0)", "graph1 (1)"]
    assert len(seen["rows"]) == 1 and "add" in seen["rows"][0] and seen["hint"] == "promoted"
    assert "net.py:3, print(x): why" in seen["overview"]
    assert "graph0 runs under autocast: not captured" in seen["overview"]
    assert "computes in float32" in seen["overview"] and "net.py:3" not in seen["node"]
    assert seen["again"] == seen["overview"] and seen["followed"] == "0"
