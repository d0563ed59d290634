"""The command line as a user types it: output, files and exit codes."""

from __future__ import annotations

import importlib
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import amp_graph
from amp_graph.__main__ import main
from amp_graph.commands import COMMANDS

MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.second(torch.relu(self.first(x * 100)) * 6e4 * 1e-4)

def small():
    torch.manual_seed(0)
    return Net(), (torch.randn(4, 8),)

def scored():
    return nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8)), torch.randn(4, 8)

def full():
    model, batch = small()
    return model, [batch, {"x": torch.randn(6, 8)}], lambda y: y.abs().mean()

def converted():
    import amp_graph
    model, batch = small()
    return amp_graph.convert(model, policy="float16"), batch

def wrong():
    return small()[0]

def pair():
    return 3, small()[1]

def odd():
    return small()[0], 7

def raising():
    raise ValueError("of my own")

def refused():
    return small()[0], torch.randn(4, 3)

counted = []

def counting():
    counted.append(1)
    return small()

value = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a module of models in it."""
    torch._dynamo.reset()
    (tmp_path / "models_here.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    sys.modules.pop("models_here", None)
    return tmp_path


def test_explain(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "models_here:small", "--dtype", "bfloat16", "--json", "e.json"]) == 0
    text = capsys.readouterr().out
    assert "Net in bfloat16" in text and "Most rewarding changes" in text
    assert json.loads((folder / "e.json").read_text())["model"] == "Net"


def test_the_level_of_a_policy(folder: Path) -> None:
    options = ["--dtype", "bfloat16", "--level"]
    for level in ("safe", "balanced"):
        torch._dynamo.reset()
        assert main(["dump", "models_here:scored", level, *options, level]) == 0
    assert main(["diff", "safe/plan.json", "balanced/plan.json"]) == 1


def test_dump_and_a_plan_from_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", "models_here:small", "out", "--dtype", "float16"]) == 0
    assert (folder / "out" / "index.html").exists()
    assert "out/index.html" in capsys.readouterr().out
    torch._dynamo.reset()
    assert main(["explain", "models_here:full", "--plan", "out/plan.json"]) == 0
    assert "Net in float16" in capsys.readouterr().out
    assert main(["diff", "out/plan.json", "out/plan.json"]) == 0


def test_export(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "models_here:small", "small.pt2", "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out.startswith("small.pt2: weights of")
    program = torch.export.load(folder / "small.pt2")
    assert {p.dtype for p in program.state_dict.values()} == {torch.bfloat16}
    assert program.module()(torch.randn(4, 8)).dtype is torch.float32
    assert main(["export", "models_here:small", "no_folder/small.pt2"]) == 2
    assert "no_folder" in capsys.readouterr().err


def test_compare(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", "models_here:full", "--dtype", "float16", "--bound", "0.1"]
    assert main([*command, "--json", "c.json", "--plot", "c.svg"]) == 1
    assert "infinite" in capsys.readouterr().out
    assert json.loads((folder / "c.json").read_text())["dtype"] == "float16"
    assert (folder / "c.svg").read_text().startswith("<svg")
    torch._dynamo.reset()
    assert main(["compare", "models_here:small", "--dtype", "bfloat16", "--bound", "0.5"]) == 0


def test_calibrate_and_diff(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--dtype", "float16", "--bound", "0.1", "--output", "plan.json"]
    assert main(["calibrate", "models_here:full", *options]) == 0
    assert "denied" in capsys.readouterr().out
    assert amp_graph.load_plan("plan.json")
    torch._dynamo.reset()
    again = ["--plan", "plan.json", "--bound", "0.1", "--output", "again.json"]
    assert main(["calibrate", "models_here:full", *again]) == 0
    assert "0 nodes denied" in capsys.readouterr().out
    torch._dynamo.reset()
    assert main(["compare", "models_here:full", "--plan", "plan.json", "--bound", "0.1"]) == 0
    torch._dynamo.reset()
    assert main(["dump", "models_here:full", "out", "--dtype", "float16"]) == 0
    assert main(["diff", "out/plan.json", "plan.json"]) == 1
    assert "calibrated" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "expected"), [([], "float16"), (["--dtype", "bfloat16"], "bfloat16")]
)
def test_a_model_that_is_converted_keeps_its_policy_if_none_is_given(
    options: list[str], expected: str, folder: Path
) -> None:
    subject = "models_here:converted"
    assert main(["compare", subject, *options, "--json", "c.json"]) == 0
    assert json.loads((folder / "c.json").read_text())["dtype"] == expected
    assert main(["calibrate", subject, *options, "--bound", "9", "--output", "p.json"]) == 0
    assert {plan.dtype for plan in amp_graph.load_plan("p.json")} == {getattr(torch, expected)}
    assert main(["export", subject, *options, "m.pt2"]) == 0
    program = torch.export.load(folder / "m.pt2")
    assert {p.dtype for p in program.state_dict.values()} == {getattr(torch, expected)}


def test_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lists", "gelu", "aten.softmax.int"]) == 0
    text = capsys.readouterr().out
    assert "aten.gelu: infer" in text and "deny, group 'softmax' (deny.toml)" in text
    assert main(["lists", "relu_", "aten.pow_", "aten.add_.Tensor"]) == 0
    text = capsys.readouterr().out
    assert "aten.relu_ follows aten.relu: clear" in text and "aten.pow_ follows aten.pow" in text
    assert main(["lists", "aten.__lshift__"]) == 1
    assert "on no list" in capsys.readouterr().out
    assert main(["lists"]) == 0
    assert "matmul" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "nonsense"], "names no function"),
        (["explain", ".models_here:small"], "names no function"),
        (["explain", "missing_module:f"], "cannot import 'missing_module'"),
        (["explain", "models_here.py:small"], "such as my_project.models:small, without .py"),
        (["explain", "models_here:absent"], "has no function 'absent'"),
        (["explain", "models_here:smal"], "has no function 'smal'. Did you mean 'small'?"),
        (["explain", "models_here:value"], "has no function 'value'"),
        (["explain", "models_here:wrong"], "has to return (model, batch[, loss])"),
        (["explain", "models_here:pair"], "returned (int, tuple); it has to return (model"),
        (["explain", "models_here:odd"], "a batch is a tensor"),
        (["explain", "models_here:small", "--plan", "none.json"], "cannot be read"),
        (["explain", "models_here:small", "--lists", "none.toml"], "cannot be read"),
        (["diff", "none.json", "none.json"], "cannot be read"),
        (["compare", "models_here:small", "--json", "no/folder.json"], "no/folder.json"),
        (["lists", "aten.gelo"], "has no operator 'aten.gelo'. Did you mean 'aten.gelu'?"),
    ],
)
def test_mistakes_exit_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "models_here:raising"], "ValueError: of my own"),
        (["explain", "models_here:refused"], "shapes cannot be multiplied"),
        (["compare", "models_here:raising", "--bound", "1"], "ValueError: of my own"),
        (["compare", "models_here:refused", "--bound", "1"], "shapes cannot be multiplied"),
    ],
)
def test_errors_of_the_models_own_exit_with_2_and_their_traceback(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "Traceback" in said and message in said.splitlines()[-1]


def test_what_is_worked_on_is_no_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr("amp_graph.commands.command.progress_out", terminal)
    assert main(["explain", "models_here:absent[/b]"]) == 2
    said = capsys.readouterr().err
    assert "has no function 'absent[/b]'" in said and "Traceback" not in said


@pytest.mark.parametrize("bound", ["nan", "-1", "x"])
@pytest.mark.parametrize("command", ["compare", "calibrate"])
def test_a_bound_is_a_number(command: str, bound: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "models_here:small", f"--bound={bound}"])
    assert ended.value.code == 2 and "--bound" in capsys.readouterr().err


CALIBRATE = ["calibrate", "models_here:counting", "--bound", "0.1", "--output"]


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ([*CALIBRATE, "no/plan.json"], "no/plan.json"),
        ([*CALIBRATE, "."], "."),
        (["compare", "models_here:counting", "--json", "no/c.json"], "no/c.json"),
        (["compare", "models_here:counting", "--plot", "no/c.svg"], "no/c.svg"),
        (["explain", "models_here:counting", "--json", "no/e.json"], "no/e.json"),
        (["dump", "models_here:counting", "models_here.py"], "models_here.py"),
        (["dump", "models_here:counting", "models_here.py/out"], "models_here.py/out"),
        (["export", "models_here:counting", "small.txt"], "small.txt"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_work(
    arguments: list[str], path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    importlib.import_module("models_here")
    assert main(arguments) == 2
    assert f"error: {path}: " in capsys.readouterr().err
    assert not sys.modules["models_here"].counted


@pytest.mark.parametrize(
    "arguments",
    [
        ["dump", "models_here:counting", ""],
        ["export", "models_here:counting", ""],
        ["explain", "models_here:counting", "--json", ""],
        ["compare", "models_here:counting", "--plot", ""],
        ["compare", "models_here:small", "--lists", ""],
        ["compare", "models_here:small", "--plan", ""],
        ["diff", "", ""],
    ],
)
def test_an_empty_path_is_not_the_current_folder(
    arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    importlib.import_module("models_here")
    assert main(arguments) == 2
    assert "error: a path is empty; the current folder is '.'" in capsys.readouterr().err
    assert not sys.modules["models_here"].counted
    assert {f.name for f in folder.iterdir()} <= {"models_here.py", "__pycache__"}


@pytest.mark.parametrize("command", [c.name for c in COMMANDS])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert f"usage: amp_graph {command}" in capsys.readouterr().out


def test_as_a_module_and_without_a_command() -> None:
    command = [sys.executable, "-m", "amp_graph"]
    ran = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert all(c.about.split()[0] in ran.stdout for c in COMMANDS)
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and "COMMAND" in ran.stderr
    ran = subprocess.run([*command, "lists", "gelu"], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("aten.gelu: infer")
