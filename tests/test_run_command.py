"""`python -m amp_graph run`: the script's own arguments, exit codes and tracebacks."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

TRAIN = """
import sys
import torch
from torch import nn

net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    net(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
print(__name__, sys.argv[1:])
sys.exit(int(sys.argv[2]))
"""
RAISES = """
def inner():
    raise OSError("the script's own")

inner()
"""
LOOKS_AT_ITSELF = """
import dataclasses

@dataclasses.dataclass
class Config:
    rate: float = 0.1

print(dataclasses.fields(Config)[0].type, type(__builtins__), __annotations__)
"""
WAITS = """
import time
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def run(tmp_path):
    def run(code, *arguments, command=("-m", "amp_graph", "run")):
        script = tmp_path / "script.py"
        script.write_text(code)
        line = [sys.executable, *command, str(script), *arguments]
        environment = {k: v for k, v in os.environ.items() if k != "AMP_GRAPH_ENABLE"}
        return subprocess.run(
            line, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path
        )

    return run


def test_arguments_and_exit_code_are_the_scripts(run):
    result = run(TRAIN, "--rate", "3")
    assert result.stdout == "__main__ ['--rate', '3']\n"
    assert result.returncode == 3
    assert "Sequential: " in result.stderr and "on bfloat16 tensors" in result.stderr


def test_a_script_is_compiled_as_ever(run):
    """It has annotations that are no text, and modules where Python puts them."""
    plain, ours = run(LOOKS_AT_ITSELF, command=()), run(LOOKS_AT_ITSELF)
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    assert plain.stdout.startswith("<class 'float'> <class 'module'>")


def test_a_traceback_is_the_scripts(run):
    plain, ours = run(RAISES, command=()), run(RAISES)
    assert ours.returncode == plain.returncode == 1
    report = ours.stderr.index("amp_graph:")
    assert ours.stderr[:report] == plain.stderr


def test_a_module_runs_by_its_name(run, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "job.py").write_text("import sys; print(__name__, sys.argv[1:])")
    line = [sys.executable, "-m", "amp_graph", "run", "-m", "package.job", "-x"]
    result = subprocess.run(line, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert result.stdout == "__main__ ['-x']\n", result.stderr


def test_a_folder_and_an_archive_run_as_they_do_in_python(tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "part.py").write_text("import sys; first = sys.path[0]")
    main = "import sys, part; print(__name__, sys.argv[1:], part.first, sys.path[1] == part.first)"
    (tmp_path / "app" / "__main__.py").write_text(main)
    shutil.make_archive(tmp_path / "archive", "zip", tmp_path / "app")
    for given in ("app", "archive.zip"):
        for command in ([], ["-m", "amp_graph", "run"]):
            line = [sys.executable, *command, given, "-x"]
            result = subprocess.run(line, capture_output=True, text=True, timeout=120, cwd=tmp_path)
            assert result.stdout == f"__main__ ['-x'] {tmp_path / given} False\n", result.stderr


def test_a_missing_script_is_one_line(run, tmp_path):
    line = [sys.executable, "-m", "amp_graph", "run", "nowhere.py"]
    result = subprocess.run(line, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == "error: there is no file 'nowhere.py'; give the path of a script\n"


def test_an_interrupt_ends_the_script_as_it_would(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WAITS)
    line = [sys.executable, "-m", "amp_graph", "run", str(script)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in stderr and "amp_graph: NOTHING WAS CONVERTED" in stderr
