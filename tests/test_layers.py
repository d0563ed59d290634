"""Imports point one way: from the command line and the patch down to the nouns of the compiler."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "amp_graph"
# Each imports from those before it in the list, and within itself.
LAYERS = [
    "errors", "kept", "modules", "results",
    "ir", "plans",
    "cpu", "flow", "listing", "watched",
    "capture", "oplists", "reasons", "training",
    "modes", "override", "policy",
    "passes",
    "backend",
    "calls",
    "convert", "export", "inspection",
    "autopatch", "numerics",
    "__init__", "commands",
    "__main__",
]  # fmt: skip


def layer_of(module: str) -> str:
    return module.removeprefix("amp_graph").lstrip(".").partition(".")[0] or "__init__"


def imported(file: Path) -> Iterator[str]:
    """The modules of the package that a file imports when it is imported itself."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("amp_graph"))
        elif isinstance(node, ast.ImportFrom) and node.module == "amp_graph":
            # a part of the package, or a name that it has from one
            parts = [f"amp_graph.{alias.name}" for alias in node.names]
            yield from (p if layer_of(p) in LAYERS else "amp_graph" for p in parts)
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("amp_graph."):
            yield str(node.module)


def test_every_part_has_its_layer() -> None:
    files, folders = PACKAGE.glob("*.py"), PACKAGE.glob("*/__init__.py")
    assert {*LAYERS} == {*(f.stem for f in files), *(f.parent.name for f in folders)}


def test_imports_point_down() -> None:
    upward = []
    for file in chain(PACKAGE.glob("*.py"), PACKAGE.glob("*/*.py")):
        layer = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for module in imported(file):
            if LAYERS.index(layer_of(module)) > LAYERS.index(layer):
                upward.append(f"{file.relative_to(PACKAGE)} imports {module}")
    assert not upward


def test_stages_do_not_import_each_other() -> None:
    stages = {"annotate", "paint", "place_casts", "emit", "verify", "split_attention"}
    for stage in sorted(stages):
        others = {module.rpartition(".")[2] for module in imported(PACKAGE / f"passes/{stage}.py")}
        assert not others & stages, stage
