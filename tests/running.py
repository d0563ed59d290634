"""Runs the scripts of tests/scripts as their users would, with amp_graph installed but unnamed."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
SCRIPTS = TESTS / "scripts"
NUMBER = re.compile(r"-?\d+(\.\d+)?(e[-+]?\d+)?")


@dataclass(frozen=True)
class Run:
    """What one process left behind. `counts` are those of tests/hooks, of rank 0."""

    code: int
    out: str
    err: str
    report: dict[str, Any] | None
    counts: Counter[str]

    @property
    def final_loss(self) -> float:
        return float(re.findall(r"^final loss (\S+)$", self.out, re.MULTILINE)[-1])

    @property
    def words(self) -> str:
        """The output without its numbers."""
        return NUMBER.sub("#", self.out)

    @property
    def said(self) -> list[str]:
        """The lines that amp_graph wrote, but for what depends on this CPU."""
        lines = [line for line in self.err.splitlines() if line.startswith("amp_graph: ")]
        return [line for line in lines if "this CPU has no kernels" not in line]


def environment(**variables: str) -> dict[str, str]:
    """An environment in which this checkout is what gets imported."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("AMP_GRAPH_")}
    kept |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(TESTS.parent)}
    return kept | variables


def run(
    command: list[str], folder: Path | None = None, cwd: Path | None = None, **variables: str
) -> Run:
    """Run a command; with a folder, its operators are counted and the report is written there."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.json"):
            old.unlink()
        paths = f"{TESTS / 'hooks'}{os.pathsep}{TESTS.parent}"
        variables |= {"AMP_GRAPH_DUMP": str(folder), "COUNTS": str(folder), "PYTHONPATH": paths}
    done = subprocess.run(
        command, env=environment(**variables), cwd=cwd, capture_output=True, text=True, timeout=240
    )
    report, counts = None, Counter()
    if folder is not None:
        if (folder / "report.json").exists():
            report = json.loads((folder / "report.json").read_text())
        for file in folder.glob("counts-0-*.json"):
            counts.update(json.loads(file.read_text()))
    return Run(done.returncode, done.stdout, done.stderr, report, counts)


@functools.cache
def forks() -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(python(TESTS / "forked_runs.py"), env=environment(), text=True, **pipes)


def run_plain(command: list[str], cwd: Path) -> Run:
    """Run a script that has nothing to do with amp_graph, by a process that has imported torch."""
    if command[1].startswith("-"):
        return run(command, cwd=cwd)
    asked, answered = forks().stdin, forks().stdout
    assert asked is not None and answered is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        files = {"cwd": str(cwd), "out": str(out), "err": str(err)}
        print(json.dumps({"arguments": command[1:], **files}), file=asked, flush=True)
        code = int(answered.readline())
        return Run(code, out.read_text(), err.read_text(), None, Counter())


def python(*arguments: object) -> list[str]:
    return [sys.executable, *map(str, arguments)]
