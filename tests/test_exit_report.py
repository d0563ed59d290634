"""The lines that a script ends with under AMP_GRAPH_ENABLE."""

from __future__ import annotations

from pathlib import Path

import torch
from running import python, run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amp_graph
from amp_graph.autopatch.exit_report import describe
from amp_graph.autopatch.script_models import model_of
from amp_graph.convert import record_of

BY_A_METHOD = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, depth=1):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth)))

    def forward(self, x):
        return x + self.layers(x).relu()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([*(Block() for _ in range(4)), Block(depth=2)])

    def loss(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

model = Net()
for _ in range(3):
    model.loss(torch.ones(2, 8)).backward()
"""


def test_parts_that_are_alike_are_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BY_A_METHOD)
    done = run(python(script), AMP_GRAPH_ENABLE="1")
    assert done.code == 0, done.err
    four, one = done.said
    assert four.startswith("amp_graph: Block (4 alike): ") and "in 12 runs of 1 graph" in four
    assert one.startswith("amp_graph: Block: ") and "in 3 runs of 1 graph" in one


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(checkpoint(lambda y: self.a(y).relu(), x, use_reentrant=False))


def test_operators_are_counted_as_by_explain() -> None:
    model = amp_graph.convert(Checkpointed(), policy="bfloat16")
    model(torch.randn(4, 8))
    told = model_of(model)
    told.record = record_of(model)
    described = describe(told)
    operators = amp_graph.explain(model).data.modules[0].figures.operators
    assert (described["operators_low"], described["operators"]) == (3, 3)
    assert (operators.low, operators.total) == (3, 3)
