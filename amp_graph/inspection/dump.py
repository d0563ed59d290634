"""`dump`: everything there is to see of a converted model, as files in a folder.

index.html            one page for the whole model; opens without a network
plan.json             the plans, for `convert(model, plan=...)`; those that the model follows and
                      that were not for any of its graphs so far stay there
graph0.before.txt     a graph as captured, and graph0.after.txt as it runs; the same two as
                      .json and .dot, and .svg where Graphviz's `dot` is installed
model_explorer.json   all graphs for Google's Model Explorer
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from torch import nn

from amp_graph.calls.conversion import conversion_of
from amp_graph.convert import plans
from amp_graph.errors import AmpGraphError
from amp_graph.files import check_folder, write_whole, writing
from amp_graph.inspection.annotated import AnnotatedGraph
from amp_graph.inspection.formats import graph_dot, graph_json, model_explorer
from amp_graph.inspection.graph_text import graph_text
from amp_graph.inspection.page import page
from amp_graph.inspection.source import AnnotatedModel, annotated_model
from amp_graph.ir import Plan
from amp_graph.plans.matching import fingerprint
from amp_graph.plans.pins import Saved
from amp_graph.plans.plan_file import save_plan

PAGE, PLAN = "index.html", "plan.json"
DRAWN_NODES = 800  # Graphviz takes minutes for more, and nobody can read the drawing
DRAWING_SECONDS = 60
OF_A_GRAPH = re.compile(r"graph(0|[1-9][0-9]*)\.(before|after)\.(txt|json|dot|svg)")

Progress = Callable[[str, int, int], None]


def dump(
    model: nn.Module, folder: str | Path, *, progress: Progress | None = None
) -> tuple[Path, ...]:
    """Write all views of a converted model into `folder`, made if it is missing, and return the
    files written. `progress` is told each file's name before it is written, how many were
    before it, and how many there are. Files of graphs that an earlier dump left there are removed.

    Raises AmpGraphError if the model is not converted, or has not run, the folder or a file in it
    cannot be written, or it has a plan.json that no dump wrote.
    """
    check_folder(folder)
    saved = conversion_of(model).compiler.saved
    folder = check_dump(folder, None if saved is None else saved.origin)
    annotated = annotated_model(model)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    written = []
    unseen = _unseen(saved, plans(model)) if saved and _is_same(folder, saved.origin) else ()
    files = list(_files(annotated, (*plans(model), *unseen)))
    for i, (name, write) in enumerate(files):
        if progress is not None:
            progress(name, i, len(files))
        with writing(folder / name):
            write(folder / name)
        if (folder / name).exists():
            written.append(folder / name)
    with writing(folder):
        _remove_others(folder, written)
    return tuple(written)


def check_dump(folder: str | Path, plan: str | None) -> Path:
    """Refuse a folder that cannot be written, or in which someone keeps another plan than the file
    that is followed, `plan`; its path. Raises AmpGraphError."""
    path = check_folder(folder)
    is_dumped = (path / PAGE).exists() or not (path / PLAN).exists()
    if not is_dumped and not (plan is not None and _is_same(path, plan)):
        raise AmpGraphError(
            f"{path / PLAN}: was not written by a dump and would be lost; give another folder"
        )
    return path


def _is_same(folder: Path, plan: str) -> bool:
    """Whether the file of a plan is the one that a dump writes."""
    return (folder / PLAN).exists() and Path(plan).resolve() == (folder / PLAN).resolve()


def _unseen(saved: Saved, plans: Sequence[Plan]) -> Iterator[Plan]:
    """The saved plans that are for none of these graphs."""
    seen = {*map(fingerprint, plans)}
    marked = zip(saved.plans, saved.fingerprints, strict=True)
    return (plan for plan, mark in marked if mark not in seen)


def _remove_others(folder: Path, written: Sequence[Path]) -> None:
    """Remove files with names that a dump gives, unless this dump wrote them."""
    for path in set(folder.iterdir()).difference(written):
        if OF_A_GRAPH.fullmatch(path.name) and path.is_file():
            path.unlink()


Write = Callable[[Path], object]


def _files(model: AnnotatedModel, plans: Sequence[Plan]) -> Iterator[tuple[str, Write]]:
    """Yield the name of each file, and what writes it at a path, if it can be written."""
    yield PAGE, _text(lambda: page(model))
    yield PLAN, partial(save_plan, plans)
    sides = [("before", g) for g in model.before] + [("after", g) for g in model.after]
    for side, graph in sorted(sides, key=lambda pair: pair[1].name):
        stem = f"{graph.name}.{side}"
        yield f"{stem}.txt", _text(partial(graph_text, graph))
        yield f"{stem}.json", _text(partial(_json, graph))
        yield f"{stem}.dot", _text(partial(graph_dot, graph))
        if _is_drawable(graph):
            yield f"{stem}.svg", _draw
    collection = model_explorer(model.name, sides)
    yield "model_explorer.json", _text(lambda: json.dumps(collection))


def _text(make: Callable[[], str]) -> Write:
    return lambda path: write_whole(path, make())


def _json(graph: AnnotatedGraph) -> str:
    return json.dumps(graph_json(graph), indent=1) + "\n"


def _is_drawable(graph: AnnotatedGraph) -> bool:
    nodes = sum(len(g.nodes) for g in graph.everything())
    return shutil.which("dot") is not None and 0 < nodes <= DRAWN_NODES


def _draw(path: Path) -> None:
    """Have Graphviz draw the DOT file beside it; no file is left if that fails."""
    command = ["dot", "-Tsvg", path.with_suffix(".dot").name, "-o", path.name]
    run = partial(subprocess.run, cwd=path.parent, check=True, capture_output=True)
    try:
        run(command, timeout=DRAWING_SECONDS)
    except (subprocess.SubprocessError, OSError):
        path.unlink(missing_ok=True)
