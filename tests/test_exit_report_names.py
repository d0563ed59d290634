"""What models go by in the lines that a script ends with under AMP_GRAPH_ENABLE."""

from __future__ import annotations

from pathlib import Path

from running import python, run

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


LAYERS = """
import torch
from torch import nn

layers = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1), nn.Tanh(), nn.Bilinear(8, 8, 2)]
first, second, last, tanh, both = layers
for _ in range(2):
    x = tanh(second(first(torch.ones(2, 8))))
    (last(x).sum() + both(x, x).sum()).backward()
"""


def test_layers_that_would_go_by_one_name_go_by_what_they_print(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LAYERS)
    done = run(python(script), AMP_GRAPH_ENABLE="1")
    assert done.code == 0, done.err
    names = [line.removeprefix("amp_graph: ").rpartition(": ")[0] for line in done.said]
    square, last = (f"Linear(in_features=8, out_features={n}, bias=True)" for n in (8, 1))
    assert names == [f"{square} (2 alike)", last, "Bilinear"]
