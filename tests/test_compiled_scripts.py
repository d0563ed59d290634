"""Models that a script calls from what it compiles by itself, and scripts without Dynamo."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from nets import low_share
from running import python, run, run_plain
from torch import Tensor, nn
from torch._dynamo.utils import counters

import amp_graph
from amp_graph.autopatch.exit_report import write_report

X = torch.linspace(-1, 1, 32).reshape(4, 8)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        torch._dynamo.graph_break()
        return x.relu()


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.last = Part(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(x))


def compiled_in_place() -> nn.Module:
    model = Whole()
    model.compile(backend="eager")
    return model


def bare_container() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model.compile(backend="eager")
    return model


def in_a_function() -> nn.Module:
    model = Whole()

    class Step(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.compile(lambda x: model(x).square(), backend="eager")(x)

    return Step()


@pytest.mark.parametrize("make", [compiled_in_place, bare_container, in_a_function])
def test_what_a_script_compiles_is_left_as_it_is(make, start, capsys) -> None:
    plain = make()
    plain(X)
    frames = counters["frames"]["total"]
    torch._dynamo.reset()
    counters.clear()
    installation, model = start(), make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as Dynamo gives where it cannot trace what it meets
        for _ in range(3):
            with torch.no_grad():
                assert low_share(model, X) == 0
    assert counters["frames"]["total"] <= frames + 1  # once more for the counter's mode
    assert not any(amp_graph.is_converted(m) for m in model.modules())
    assert installation.models.compiles or make is bare_container  # which 2.13 leaves to Python
    # Nobody but Dynamo calls a part that is captured with the whole.
    assert {m.left_alone for m in installation.models.seen} <= {"the script uses torch.compile"}
    said = [line for line in capsys.readouterr().err.splitlines() if "left as it is" in line]
    assert said == [
        "amp_graph: what the script compiles is left as it is: the script uses torch.compile"
    ]


def test_a_script_of_which_all_is_compiled_is_told_so(start, capsys) -> None:
    installation = start()
    step = torch.compile(nn.functional.linear, backend="eager")
    step(X, X)
    assert installation.models.compiles
    write_report(installation.models.seen, None, compiles=installation.models.compiles)
    assert "and what the script compiles is left as it is" in capsys.readouterr().err


def test_a_part_of_a_converted_model_behind_a_break_is_none_of_the_scripts(start, capsys) -> None:
    installation, model = start(), Whole()
    for _ in range(2):
        model(X)
    explicit = amp_graph.convert(Whole(), policy="bfloat16")
    explicit(X)
    assert next(iter(installation.models.seen)).name == "Whole"
    assert "the script uses torch.compile" not in capsys.readouterr().err


class Batches(nn.Module):
    """Runs only once somebody asks for what it yields."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        x = self.first(x)
        yield x
        yield self.second(x)


def test_of_a_model_that_yields_its_parts_are_converted(start) -> None:
    installation, model = start(), Batches()
    assert [y.shape[1] for y in model(X)] == [8, 3]
    assert [m.name for m in installation.models.seen] == ["Linear", "Linear"]
    assert amp_graph.is_converted(model.first) and amp_graph.is_converted(model.second)


TRAINS = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    loss = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
print("final loss", loss.item())
"""


@pytest.mark.parametrize("variable", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_without_dynamo_models_run_under_autocast_and_say_so(tmp_path: Path, variable: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    given = {variable: "1", "AMP_GRAPH_ENABLE": "1", "AMP_GRAPH_DTYPE": "bfloat16"}
    done = run(python(script), **given)
    assert done.code == 0, done.err
    plain = run_plain(python(script), tmp_path)
    assert done.final_loss == pytest.approx(plain.final_loss, rel=0.02)
    first = "amp_graph: Sequential is not captured and runs under autocast: PyTorch's Dynamo is off"
    assert done.said[0].startswith(first) and done.err.count(first) == 1


@torch._dynamo.config.patch(disable=True)
def test_dynamo_off_by_its_settings(recwarn) -> None:
    model = amp_graph.convert(Whole(), policy="float16")
    model(X).sum().backward()
    assert low_share(model, X) == 1
    (plan,) = amp_graph.plans(model)
    assert plan.autocast and plan.dtype is torch.bfloat16
    (warning,) = recwarn.list
    assert "Dynamo is off" in str(warning.message)
    with pytest.raises(amp_graph.CaptureError, match="Dynamo is off"):
        amp_graph.compare(model, X)
