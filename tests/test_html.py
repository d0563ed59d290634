"""The page of a model, in a real browser."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from browsing import browser, page_of, work
from small_models import SMALL, Odd

from amp_graph.inspection.annotated import AnnotatedGraph, AnnotatedNode
from amp_graph.inspection.graph_text import call
from amp_graph.inspection.page import page
from amp_graph.inspection.source import AnnotatedModel
from amp_graph.reasons import Reason


def test_the_page_is_one_file_that_asks_for_nothing(tmp_path: Path) -> None:
    text = page_of(SMALL["classifier"].make(), tmp_path, *SMALL["classifier"].inputs)
    assert not re.search(r"""(src|href)=|url\(|@import|https?://""", text)
    assert "default-src 'none'" in text


def test_what_the_page_shows_is_spelled_as_in_other_views() -> None:
    node = AnnotatedNode(
        "mul",
        "layers.0.mul",
        "aten.mul.Scalar",
        "operator",
        source="net.py:3 in forward",
        operands=("x",),
        numbers=(1e-8,),
        bytes=1048570,
        flops=999999,
    )
    graph = AnnotatedGraph("graph0", "bfloat16", (node,))
    text = page(AnnotatedModel("Net", "bfloat16", (), (graph,), (graph,), ()))
    found = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    (shown,) = json.loads(found[1])["graphs"][0]["after"]["nodes"]
    assert (shown["bytes"], shown["flops"]) == ("1.0 MiB", "1 MFLOP")
    assert shown["call"] == "layers.0.mul = aten.mul.Scalar(x, 1e-08)" == call(node, {})
    assert shown["line"] == "net.py:3"
    assert not re.search(r"KiB|FLOP", text.replace(found[1], "").partition("<script>")[2])


@browser
def test_search_filters_and_reasons(tmp_path: Path) -> None:
    text = page_of(SMALL["precise"].make(), tmp_path, *SMALL["precise"].inputs)
    seen = work(
        text,
        """
        seen.start = get("count").textContent;
        type(" aten.EXP  listed");
        seen.search = shown();
        type("");
        get("operator").value = "aten.linear";
        get("operator").dispatchEvent(new Event("change"));
        seen.operator = shown().length;
        get("reset").click();
        seen.all = get("count").textContent;
        button("#tree .name", "second").click();
        seen.module = shown();
        get("reset").click();
        button("#colors button", "deny").click();
        seen.withoutDeny = shown().some((r) => r.startsWith("deny"));
        get("reset").click();
        choose(view.byName.get("add"), true);
        seen.why = [...document.querySelectorAll("#detail ol li")].map((r) => r.textContent);
        seen.code = document.querySelector("#detail pre").textContent;
        seen.facts = document.querySelector("#detail .facts").textContent;
        seen.call = document.querySelector("#detail .quiet").textContent;
        for (const text of document.querySelectorAll("#detail p, #detail li"))
          text.append("long".repeat(99));
        seen.wide = get("detail").scrollWidth - get("detail").clientWidth;
        document.querySelector("#detail ol .link").click();
        seen.followed = document.querySelector("#detail h2").textContent;
        press("ArrowDown");
        seen.next = document.querySelector("#detail h2").textContent;
        document.querySelector('[data-side="before"]').click();
        seen.before = shown().filter((r) => r.startsWith("cast")).length;
        seen.place = location.hash;
        """,
        tmp_path,
    )
    assert seen["start"] == "18 of 23 nodes and casts"
    assert len(seen["search"]) == 1 and "exp = aten.exp(to)" in seen["search"][0]
    assert seen["operator"] == 2
    assert seen["all"].endswith(" nodes and casts") and "of" not in seen["all"]
    assert all("second" in row for row in seen["module"]) and seen["module"]
    assert not seen["withoutDeny"]
    assert "float32 for precision" in seen["why"][0]
    assert seen["code"] == "hidden = self.first(x).float().exp() + 1"
    assert seen["call"] == "add = aten.add.Tensor(exp, 1)" and "stores128 B" in seen["facts"]
    assert seen["wide"] <= 0
    assert seen["followed"] in ("exp", "to") and seen["next"] != seen["followed"]
    assert seen["before"] == 0
    assert seen["place"].startswith("#graph0/")


@browser
def test_names_are_shown_and_not_run(tmp_path: Path) -> None:
    text = page_of(Odd(), tmp_path, torch.zeros(4, 8))
    seen = work(
        text,
        """
        seen.ran = typeof ran;
        seen.names = [...document.querySelectorAll("#tree .name")].map((b) => b.textContent);
        get("reset").click();
        seen.rows = shown().join(" ");
        for (const node of view.graph.nodes) choose(node, true);
        seen.elements = document.querySelectorAll("#detail b, #rows b b, #tree b").length;
        """,
        tmp_path,
    )
    assert seen["ran"] == "undefined"
    assert set(Odd.NAMES) <= set(seen["names"])
    assert all(name in seen["rows"] for name in Odd.NAMES)
    assert seen["elements"] == 0


@browser
def test_a_place_in_the_address_opens_that_node(tmp_path: Path) -> None:
    text = page_of(SMALL["checkpointed"].make(), tmp_path, *SMALL["checkpointed"].inputs)
    seen = work(
        text,
        """
        seen.node = document.querySelector("#detail h2").textContent;
        seen.chosen = document.querySelectorAll('#rows [aria-selected="true"]').length;
        seen.graphs = [...get("graph").options].map((o) => o.textContent);
        """,
        tmp_path,
        "#graph0/linear",
    )
    assert (seen["node"], seen["chosen"]) == ("linear", 1)
    assert [name.split()[0] for name in seen["graphs"]] == ["graph0", "graph0.wrap_body_0"]


def large(nodes: int) -> AnnotatedModel:
    def node(i: int) -> AnnotatedNode:
        chain = (Reason(f"n{i}", "downstream"), Reason(f"n{max(0, i - 1)}", "listed"))
        return AnnotatedNode(
            f"n{i}",
            f"n{i}",
            "aten.add.Tensor",
            "operator",
            color=("allow", "deny", "infer", "clear")[i % 4],
            storage="bfloat16",
            shape="(64, 64)",
            module=f"layers.{i // 50}.block",
            source=f"net.py:{i} in forward",
            why="free: arithmetic",
            chain=chain,
            operands=(f"n{max(0, i - 1)}",),
            readers=(f"n{i + 1}",),
            is_float=True,
            low=i % 2 == 0,
        )

    graph = AnnotatedGraph("graph0", "bfloat16", tuple(node(i) for i in range(nodes)))
    return AnnotatedModel("Large", "bfloat16", (), (graph,), (graph,), ())


def drawn(nodes: int, folder: Path) -> dict[str, Any]:
    """How many elements scrolling, searching and choosing add to the page of a large graph, the
    most of twenty times each."""
    folder.mkdir()
    return work(
        page(large(nodes)),
        """
        const changes = new MutationObserver(() => {});
        changes.observe(document.body, { childList: true, subtree: true });
        const added = () =>
          changes
            .takeRecords()
            .flatMap((change) => [...change.addedNodes])
            .reduce((sum, node) => sum + 1 + (node.querySelectorAll?.("*").length ?? 0), 0);
        const most = (what) => {
          const counts = [];
          for (let i = 0; i < 20; i++) {
            added();
            what(i);
            counts.push(added());
          }
          return Math.max(...counts);
        };
        seen.rows = shown().length;
        seen.search = most((i) => type("n" + (i % 10)));
        type("");
        seen.scroll = most((i) => { get("scroll").scrollTop = i * 600; list.draw(); });
        seen.choose = most((i) => choose(view.graph.nodes[i * 20], true));
        get("scroll").scrollTop = 1e9;
        list.draw();
        seen.atEnd = shown().at(-1);
        """,
        folder,
    )


@browser
def test_what_is_drawn_does_not_grow_with_the_graph(tmp_path: Path) -> None:
    """Only the rows in view exist, for five thousand nodes as for five hundred."""
    small, big = (drawn(nodes, tmp_path / str(nodes)) for nodes in (500, 5000))
    assert 0 < big["rows"] < 80 and "n4999" in big["atEnd"]
    for act in ("rows", "scroll", "search", "choose"):
        assert 0 < big[act] <= 1.1 * small[act], (act, small, big)


def calls_to_make(nodes: int) -> int:
    """Functions called while the page of a graph is made."""
    model, calls = large(nodes), 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        page(model)
    finally:
        sys.setprofile(None)
    return calls


def test_the_work_of_a_page_grows_with_the_nodes_alone() -> None:
    page(large(1))  # templates are compiled once
    assert calls_to_make(2000) < 2.2 * calls_to_make(1000)
    assert len(page(large(5000))) < 6_000_000
