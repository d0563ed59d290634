"""Docstrings stand by themselves: they are read in an editor, without those of their neighbours."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "amp_graph"
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef)
FOLDERS = sorted({file.parent.name for file in PACKAGE.rglob("*.py")})
# What refers to a text before, or leaves the verb for the end.
OPENINGS = "Also|As|It|Its|Of|Such|That|Their|Them|These|They|This|Those|What|Which|Whose"


def docstrings(file: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, DEFINITIONS):
            yield getattr(node, "name", "the file"), ast.get_docstring(node) or ""


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_docstring_names_what_it_is_about(folder: str) -> None:
    files = (f for f in PACKAGE.rglob("*.py") if f.parent.name == folder)
    found = ((f, name, text) for f in files for name, text in docstrings(f))
    opened = [
        f"{f.relative_to(PACKAGE)}, {name}: {text.splitlines()[0]}"
        for f, name, text in found
        if re.match(rf"({OPENINGS})\b", text)
    ]
    assert not opened
