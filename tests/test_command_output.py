"""What commands write where nobody sees it grow, and in one line where something is wrong."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from amp_graph.__main__ import main

FACTORY = """
import torch
def factory():
    return torch.nn.Linear(4, 4), (torch.randn(2, 4),)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models_piped.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_is_piped_has_no_progress_in_it_and_no_spaces_that_fill_tables() -> None:
    for arguments in (["explain", "models_piped:factory"], ["compare", "models_piped:factory"]):
        command = [sys.executable, "-m", "amp_graph", *arguments, "--dtype", "bfloat16"]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
        assert ran.stdout and not ran.stderr
        assert [line for line in ran.stdout.splitlines() if line.endswith(" ")] == []


def test_a_factory_that_takes_arguments(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "takes_arguments.py").write_text("def factory(size): ...\n")
    assert main(["explain", "takes_arguments:factory"]) == 2
    said = capsys.readouterr().err
    assert "cannot be called without arguments: missing a required argument: 'size'" in said
    assert "Traceback" not in said


def test_an_output_that_is_closed() -> None:
    command = f"{shlex.quote(sys.executable)} -m amp_graph lists aten.gelu >&-"
    ran = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is full")
def test_an_output_that_is_full() -> None:
    command = [sys.executable, "-m", "amp_graph", "lists"]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr == "error: standard output cannot be written: No space left on device\n"


def test_an_output_that_is_no_longer_read() -> None:
    """The exit code is the answer, as to anyone else."""
    command = [sys.executable, "-m", "amp_graph", "lists", "aten.gelu", "aten.__lshift__"]
    read, write = os.pipe()
    os.close(read)
    ran = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (ran.returncode, ran.stderr) == (1, "")
