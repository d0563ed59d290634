"""Imports point one way: from the command line and the patch down to the nouns of the compiler."""

from __future__ import annotations

import ast
import inspect
import re
import typing
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import amp_graph

PACKAGE = Path(__file__).parents[1] / "amp_graph"
# Each imports from those before it in the list, and within itself.
LAYERS = [
    "callers", "errors", "batches", "files", "snapshots", "weak_references", "modules",
    "outer_autocast", "patching", "results", "sums", "uncaptured",
    "dtypes", "levels", "ir", "rules", "plans",
    "cpu", "flow", "listing", "operator_names",
    "graphs", "dynamo_changes", "capture", "watched", "oplists", "reasons",
    "gradients", "steps", "weights", "boundary", "scaling", "optimizers",
    "custom_functions", "modes", "override", "policy",
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


def test_no_import_of_the_package_hides_in_a_function() -> None:
    """As one that closes a circle would."""
    hidden = []
    for file in PACKAGE.rglob("*.py"):
        nodes = ast.walk(ast.parse(file.read_text()))
        functions = (node for node in nodes if isinstance(node, ast.FunctionDef))
        for node in chain.from_iterable(map(ast.walk, functions)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("amp_graph"):
                hidden.append(f"{file.relative_to(PACKAGE)}: {ast.unparse(node)}")
    assert not hidden


def test_what_public_functions_return_has_a_public_name() -> None:
    public = [getattr(amp_graph, name) for name in amp_graph.__all__]
    for function in filter(inspect.isfunction, public):
        returned = typing.get_type_hints(function).get("return")
        for kind in (returned, *typing.get_args(returned)):
            if isinstance(kind, type) and kind.__module__.startswith("amp_graph"):
                assert kind in public, function.__name__


def test_imports_point_down() -> None:
    upward = []
    for file in chain(PACKAGE.glob("*.py"), PACKAGE.glob("*/*.py")):
        layer = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for module in imported(file):
            if LAYERS.index(layer_of(module)) > LAYERS.index(layer):
                upward.append(f"{file.relative_to(PACKAGE)} imports {module}")
    assert not upward


OF_ALL_FILES = {  # what graphs and captures are made of
    *("torch._ops.OpOverload", "torch._ops.HigherOrderOperator"),
    *("torch._subclasses.fake_tensor.FakeTensor", "torch._subclasses.fake_tensor.FakeTensorMode"),
    "torch.utils._python_dispatch.TorchDispatchMode",
    *("torch._dynamo.variables.ConstantVariable", "torch._dynamo.variables.VariableTracker"),
    *("torch._dynamo.variables.base.VariableTracker", "torch._dynamo.guards.GuardBuilder"),
}


def private_names(tree: ast.Module) -> Iterator[str]:
    """What a file takes of PyTorch that begins with an underscore, or is in a module that does."""
    for node in ast.walk(tree):
        found = []
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch":
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names if alias.name.startswith("torch.")]
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            found = [ast.unparse(node)]
        yield from (name for name in found if re.fullmatch(r"torch(\.\w+)*\._[a-zA-Z][\w.]*", name))


def test_private_names_of_pytorch_are_told_of_where_they_are_used() -> None:
    """In the docstring of the file. `amp_graph/__init__.py` says which versions they work on."""
    untold = []
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        names = {*private_names(tree)} - OF_ALL_FILES
        for name in names:
            is_operator = name.startswith(("torch.ops.", "torch.utils._pytree"))
            is_part = any(other.startswith(f"{name}.") for other in names)
            told = ast.get_docstring(tree) or ""
            if not (is_operator or is_part) and name.rpartition(".")[2] not in told:
                untold.append(f"{file.relative_to(PACKAGE)}: {name}")
    assert not untold


def test_stages_do_not_import_each_other() -> None:
    stages = {
        *("annotate", "paint", "split_attention", "place_casts", "emit", "verify"),
        *("lift_weights", "lift_results", "early_results", "scale_inside"),
    }
    for stage in sorted(stages):
        others = {module.rpartition(".")[2] for module in imported(PACKAGE / f"passes/{stage}.py")}
        assert not others & stages, stage
