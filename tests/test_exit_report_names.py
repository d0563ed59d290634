"""What models go by in the lines that a script ends with under AMP_GRAPH_ENABLE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from running import python, run
from torch import nn
from torch.optim.swa_utils import AveragedModel

from amp_graph.autopatch.exit_report import write_report
from amp_graph.autopatch.summary import summary_of

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


def said_of(code: str, folder: Path) -> list[str]:
    """What a script, "train.py" in a folder, ends with."""
    script = folder / "train.py"
    script.write_text(code)
    done = run(python(script), AMP_GRAPH_ENABLE="1")
    assert done.code == 0, done.err
    return done.said


def test_parts_that_are_alike_are_in_one_line(tmp_path: Path) -> None:
    four, one = said_of(BY_A_METHOD, tmp_path)
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
    names = [
        line.removeprefix("amp_graph: ").rpartition(": ")[0] for line in said_of(LAYERS, tmp_path)
    ]
    square, last = (f"Linear(in_features=8, out_features={n}, bias=True)" for n in (8, 1))
    assert names == [f"{square} (2 alike)", last, "Bilinear"]


GAN = """
import torch
from torch import nn

D = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
G = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
for _ in range(2):
    real = D(torch.ones(2, 8)).mean()
    made = G(torch.ones(2, 4))
    (D(made).mean() - real).backward()
"""


def test_models_of_one_name_go_by_where_they_were_first_called(tmp_path: Path) -> None:
    names = [
        line.removeprefix("amp_graph: ").rpartition(": ")[0] for line in said_of(GAN, tmp_path)
    ]
    assert names == [f"Sequential, first called at train.py:{n}" for n in (8, 9)]


class Activated(nn.Sequential):
    def __init__(self, activation: type[nn.Module]) -> None:
        super().__init__(nn.Linear(8, 8), activation())


def test_models_of_other_operators_are_not_alike(start, capsys) -> None:
    installation = start()
    models = [Activated(kind) for kind in (nn.ReLU, nn.Tanh, nn.ReLU, nn.SiLU)]
    for model in models:
        model(torch.ones(2, 8))
    write_report(installation.models.seen, None)
    names = [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()]
    assert names == ["Activated (2 alike)", "Activated", "Activated"]


@pytest.mark.parametrize("overflows", [(1, 0), (1, 2)])
def test_loss_scales_of_models_that_are_alike(start, capsys, overflows: tuple[int, ...]) -> None:
    installation, models = start(DTYPE="float16"), []
    for count in overflows:
        models.append(nn.Linear(8, 8))
        optimizer = torch.optim.SGD(models[-1].parameters(), 0.1)
        for factor in [torch.inf] * count + [1.0]:
            optimizer.zero_grad()
            (models[-1](torch.ones(2, 8)).mean() * factor).backward()
            optimizer.step()
    write_report(installation.models.seen[:1], None)
    write_report(installation.models.seen, None)
    of_first, of_both = (s for s in capsys.readouterr().err.splitlines() if "loss scale" in s)
    assert of_first.endswith("  loss scale 32768, 1 step skipped")
    scale, steps = 2**16 >> max(overflows), sum(overflows)
    told = f"{steps} {'step' if steps == 1 else 'steps'} skipped"
    assert of_both.endswith(f"  loss scale {scale} at the lowest, {told} in all")


def test_no_loss_scale_is_told_of_a_model_that_no_optimizer_stepped(start, capsys) -> None:
    """An average of the weights, and a teacher that is called with gradients enabled."""
    installation, trained, teacher = start(DTYPE="float16"), nn.Linear(8, 8), nn.Linear(8, 4)
    averages = AveragedModel(trained)
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    for _ in range(2):
        with torch.no_grad():
            averages(torch.ones(2, 8))
        wanted = teacher(torch.ones(2, 8)).detach().mean()
        (trained(torch.ones(2, 8)).mean() - wanted).backward()
        optimizer.step()
    write_report(installation.models.seen, None)
    scales = [line for line in capsys.readouterr().err.splitlines() if "loss scale" in line]
    assert [line.rpartition("  ")[2] for line in scales] == ["loss scale 65536, 0 steps skipped"]
    stepped = [
        m.module() for m in installation.models.seen if "loss_scale" in summary_of(m).as_json()
    ]
    assert stepped == [trained]


SEARCHED = """
import torch
from torch import nn

for width in {widths}:
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 2))
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
"""


@pytest.mark.parametrize("number", [3, 5])
def test_models_of_a_search_are_in_one_line_if_they_are_many(tmp_path: Path, number: int) -> None:
    lines = said_of(SEARCHED.format(widths=[*range(3, 3 + number)]), tmp_path)
    if number == 3:
        assert len(lines) == 3
        return
    (line,) = lines
    assert line.startswith("amp_graph: Sequential (5, not all alike): 30 of 30 operators on bfloat")
    assert "in 10 runs of 5 graphs" in line


class Later(nn.Module):
    """Returns what calls its network, as flows of zuko return distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(8, 4), nn.Tanh())

    def forward(self) -> Any:
        return self.network


def test_nothing_is_told_of_a_model_whose_parts_are_converted(start: Any, capsys: Any) -> None:
    installation, flow = start(), Later()
    for _ in range(2):
        flow()(torch.ones(2, 8)).sum().backward()
    capsys.readouterr()
    write_report(installation.models.seen, None)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("amp_graph: Sequential: 2 of 4 operators")
    assert summary_of(installation.models.seen[0]).as_json()["parts"] == ["Sequential"]
