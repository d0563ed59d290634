"""Scripts that bear no warning, and programs made of models, under AMP_GRAPH_ENABLE=1."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from running import python, run

STRICT = """
    import torch
    from torch import nn
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        def forward(self, x):
            print("in forward")  # ends the graph
            return self.layer(self.norm(x))
    net, x = Net(), torch.randn(4, 8)
    for _ in range(3):
        net(x).sum().backward()
    nn.LayerNorm(8)(x)  # of which nothing is converted
    print("final loss 0")
"""

TRACED = """
    import torch
    from torch import nn
    net, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)), torch.randn(4, 8)
    net(x).sum().backward()
    holder = torch.jit._trace.ONNXTracedModule(net.eval())
    graph, *_ = holder(x)
    traced = torch.jit.trace(net, x, check_trace=False)
    print("BFloat16" in str(graph), torch.equal(traced(x), net.forward(x)))
    print("final loss 0")
"""


def ran(program: str, folder: Path, *options: str):
    file = folder / "script.py"
    file.write_text(textwrap.dedent(program))
    return run(python(*options, file), folder / "dump", AMP_GRAPH_ENABLE="1")


@pytest.mark.parametrize("by_itself", [False, True])
def test_a_script_that_makes_errors_of_warnings(tmp_path: Path, by_itself: bool) -> None:
    """By an option of Python, or in its own code, which may also show and count warnings."""
    program, options = STRICT, ["-W", "error"]
    if by_itself:
        lines = 'import warnings\n    warnings.simplefilter("error")\n    net, x ='
        program, options = STRICT.replace("net, x =", lines), []
    done = ran(program, tmp_path, *options)
    assert done.code == 0, done.err
    assert "Traceback" not in done.err
    assert {m["model"]: m["converted"] for m in done.report["models"]} == {
        "Net": True,
        "LayerNorm": False,
    }
    assert all("autopatch" not in line for line in done.report["graph_breaks"])


@pytest.mark.filterwarnings("ignore")
def test_programs_made_by_tracing_are_float32(tmp_path: Path) -> None:
    done = ran(TRACED, tmp_path)
    assert done.code == 0, done.err
    assert done.out.startswith("False True")
    assert [m["model"] for m in done.report["models"]] == ["Sequential"]


SILENT = """
    import sys, torch
    sys.stderr = None  # as in a service, or in a program without a window
    net = torch.nn.Linear(4, 2)
    net(torch.randn(2, 4)).sum().backward()
    torch.nn.Linear(4, 2).double()(torch.randn(2, 4).double())  # is left as it is, which is told
    print("final loss 0")
"""


def test_a_script_without_standard_error_keeps_its_standard_output(tmp_path: Path) -> None:
    done = ran(SILENT, tmp_path)
    assert (done.code, done.out, done.err) == (0, "final loss 0\n", "")
    assert sorted(m["converted"] for m in done.report["models"]) == [False, True]
