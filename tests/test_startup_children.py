"""What amp_graph says in processes that a script starts."""

from __future__ import annotations

import multiprocessing
import socket
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import Mock

import pytest
from running import Run, python, run

from amp_graph.autopatch.patches import children_heard


def trained(folder: Path, script: str, *arguments: str) -> Run:
    file = folder / "train.py"
    file.write_text(script)
    return run(python(file, *arguments), AMP_GRAPH_ENABLE="1")


CHILDREN = """
import multiprocessing, os, sys, torch
from torch import nn

def child():
    model = nn.Linear(4, 2).double()
    model(torch.ones(3, 4).double())  # is left alone, which the main process says

if __name__ == "__main__":
    for method in ("fork", "spawn"):
        process = multiprocessing.get_context(method).Process(target=child)
        process.start()
        process.join()
        print(method, process.exitcode)
    if os.fork() == 0:
        child()
        sys.exit(0)
    os.wait()
    child()
"""


def test_child_processes_are_silent(tmp_path):
    done = trained(tmp_path, CHILDREN)
    assert done.code == 0, done.err
    assert done.out.splitlines() == ["fork 0", "spawn 0"]
    why = "its parameters are float64"
    assert done.said == [
        f"amp_graph: Linear is left as it is: {why}",
        f"amp_graph: NOTHING WAS CONVERTED, because Linear: {why}",
    ]


FORKED = """
import multiprocessing, os, sys
if sys.argv[1:] == ["before"]:
    import torch

def child(name):
    import torch
    model = torch.nn.Linear(4, 2)
    model(torch.ones(3, 4))
    if name == "helper":
        os._exit(0)

if __name__ == "__main__":
    for name, daemon in (("actor", False), ("loader", True), ("helper", False)):
        context = multiprocessing.get_context("fork")
        process = context.Process(target=child, args=(name,), name=name, daemon=daemon)
        process.start()
        process.join()
    import torch
"""


OF_MAIN = {
    "before": "nothing was converted here, because no module",
    "after": "NOTHING WAS CONVERTED, because",
}


@pytest.mark.parametrize("imported", OF_MAIN)
def test_a_forked_process_that_trains_reports_under_its_name(tmp_path, imported):
    done = trained(tmp_path, FORKED, imported)
    assert done.code == 0, done.err
    of_child, of_main = done.said
    assert of_child.startswith("amp_graph: actor: Linear: 1 of 1 operators on bfloat16 tensors")
    assert of_main.startswith(f"amp_graph: {OF_MAIN[imported]}")


def test_children_that_report_are_heard_of(monkeypatch):
    monkeypatch.setattr(BaseProcess, "start", started := Mock())
    heard = Mock()
    with children_heard(heard):
        multiprocessing.Process(daemon=True).start()
        assert not heard.called
        multiprocessing.get_context("spawn").Process().start()
    assert heard.call_count == 1 and started.call_count == 2
    assert BaseProcess.start is started


LATE_RANKS = """
import os, subprocess, sys, torch
from torch import nn, distributed

rank = int(os.environ.get("LOCAL_RANK", 0))
if rank == 0:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    other = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "LOCAL_RANK": "1"})
distributed.init_process_group("gloo", rank=rank, world_size=2)
model = nn.Linear(4, 2)
model(torch.ones(3, 4))
left_alone = nn.Linear(4, 2).double()
left_alone(torch.ones(3, 4).double())
distributed.destroy_process_group()
if rank == 0:
    sys.exit(other.wait())
"""


def test_one_rank_speaks_where_a_launcher_says_the_local_one_alone(tmp_path):
    """As Lightning starts the others, from the script itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = trained(tmp_path, LATE_RANKS, str(port))
    assert done.code == 0, done.err
    assert len([line for line in done.said if "is left as it is" in line]) == 1
    assert len([line for line in done.said if "on bfloat16 tensors" in line]) == 1
