"""What the documentation quotes is what the package does, and what it points to is there."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from running import TESTS, python, run

import amp_graph
from amp_graph.autopatch.settings import VARIABLES

ROOT = TESTS.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = PAGES[0].read_text()


def test_quickstart_prints_the_excerpt(tmp_path: Path) -> None:
    script = README.partition("## Quickstart")[2].partition("```python\n")[2].partition("```")[0]
    (tmp_path / "train.py").write_text(script)
    done = run(python("train.py"), cwd=tmp_path)
    assert done.code == 0, done.err
    printed = [line.rstrip() for line in done.out.splitlines()]
    _, start, excerpt = README.partition("    colour  precision")
    lines = [line[4:] for line in (start + excerpt.partition("\n\n")[0]).splitlines()]
    assert len(lines) > 10
    assert [line for line in printed if line in lines] == lines


def anchors(page: Path) -> set[str]:
    """Those of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_change_of_dynamo_is_told_of_once() -> None:
    changes = {file.name for file in (ROOT / "amp_graph/dynamo_changes").glob("[!_]*.py")}
    told = Counter(re.findall(r"\b\w+\.py\b", "".join(page.read_text() for page in PAGES)))
    assert {name: told[name] for name in changes} == dict.fromkeys(changes, 1)


def test_every_public_name_is_told_of() -> None:
    told = set(re.findall(r"\w+", README.partition("## The public names")[2]))
    assert told.issuperset(amp_graph.__all__)


def test_every_variable_has_a_row() -> None:
    table = (ROOT / "docs/environment.md").read_text()
    colors = ("ALLOW", "DENY", "INFER", "CLEAR")
    rows = {name for row in re.findall(r"^\| `.+$", table, re.MULTILINE) for name in row.split("`")}
    adds = {f"AMP_GRAPH_{color}LIST_ADD" for color in colors}
    removes = {name.replace("_ADD", "_REMOVE") for name in adds}
    assert "..._CLEARLIST_ADD" in rows
    assert {name for name in rows if name.startswith("AMP_GRAPH_")} <= VARIABLES.keys()
    assert VARIABLES.keys() - adds - removes <= rows
