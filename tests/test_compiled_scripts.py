"""Models that a script calls from what it compiles by itself, and scripts without Dynamo."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
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


def by_its_forward() -> nn.Module:
    """As transformers has it."""
    model = Whole()
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def by_the_forward_of_a_part() -> nn.Module:
    model = Whole()
    model.part.forward = torch.compile(model.part.forward, backend="eager")
    return model


class Decorated(Whole):
    @torch.compile(backend="eager")
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("make", [by_its_forward, by_the_forward_of_a_part, Decorated])
def test_a_model_whose_forward_is_compiled_is_left_as_it_is(make, start, capsys) -> None:
    counters.clear()
    make()(X)
    frames = counters["frames"]["total"]
    assert frames
    torch._dynamo.reset()
    counters.clear()
    start()
    model = make()
    for _ in range(3):
        model(X)
    assert counters["frames"]["total"] == frames
    assert not any(amp_graph.is_converted(m) for m in model.modules())
    assert capsys.readouterr().err.splitlines() == [
        f"amp_graph: {type(model).__name__} is left as it is: the script uses torch.compile"
    ]


class Norm(nn.LayerNorm):
    """As a library has it, of which the user of a model does not know."""

    forward = torch.compile(nn.LayerNorm.forward, backend="eager")


def test_a_model_with_a_part_that_its_class_compiles_is_converted(start) -> None:
    start()
    model = nn.Sequential(nn.Linear(8, 8), Norm(8), nn.Linear(8, 3))
    model(X)
    assert amp_graph.is_converted(model)
    assert sum(len(plan.low) for plan in amp_graph.plans(model)) >= 2


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
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")
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


class Net(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def whole(model: nn.Module) -> Callable[[Tensor], Tensor]:
    model.compile(backend="eager", fullgraph=True)
    return model


def a_function(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.compile(lambda x: model(x).square(), backend="eager", fullgraph=True)


def without_breaks_in_it(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def loss(x: Tensor) -> Tensor:
        with torch._dynamo.error_on_graph_break(True):
            return model(x).square()

    return torch.compile(loss, backend="eager")


@pytest.mark.parametrize("compiled", [whole, a_function, without_breaks_in_it])
def test_what_is_to_be_one_graph_has_the_plain_model_in_it(compiled, start, capsys) -> None:
    plain = Net(8, 3)
    expected = compiled(copy.deepcopy(plain))(X)
    torch._dynamo.reset()
    start()
    for model in (plain, copy.deepcopy(plain)):  # a copy's conversion is a copy
        model(X)
        assert amp_graph.is_converted(model)
        assert torch.equal(compiled(model)(X), expected)
    assert capsys.readouterr().err.splitlines() == [
        "amp_graph: what the script compiles is left as it is: the script uses torch.compile"
    ]


def test_what_is_to_be_one_graph_raises_for_a_model_that_was_converted_by_hand() -> None:
    model = amp_graph.convert(Net(8, 3), policy="bfloat16")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="converted by amp_graph"):
        a_function(model)(X)


STANCES = {
    "fail": {"stance": "fail_on_recompile"},
    "as captured": {"stance": "eager_on_recompile"},
    "later": {"stance": "eager_then_compile"},
    "another backend": {"stance": "default", "force_backend": "eager"},
}


@pytest.mark.parametrize("stance", STANCES)
def test_a_stance_is_for_what_the_script_compiles(stance) -> None:
    model = amp_graph.convert(Net(8, 3), policy="bfloat16")
    with torch.compiler.set_stance(**STANCES[stance]):
        model(X)
        assert [plan.autocast for plan in amp_graph.plans(model)] == [False]
        assert low_share(model, X) == 1
        if stance == "fail":  # the script's own goes on by it
            with pytest.raises(RuntimeError, match="Detected recompile"):
                torch.compile(torch.sin, backend="eager")(X)


def test_calls_that_are_to_be_eager_run_under_autocast_and_later_ones_are_captured() -> None:
    plain = Net(8, 3)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    with pytest.warns(amp_graph.ConversionWarning, match="Net runs under autocast: its calls un"):
        for _ in range(2):
            with torch.compiler.set_stance("force_eager"), torch.autocast("cpu"):
                expected = plain(X).float()
            with torch.compiler.set_stance("force_eager"):
                assert torch.equal(model(X), expected)
    model(X)
    assert [plan.autocast for plan in amp_graph.plans(model)] == [True, False]
    assert amp_graph.plans(model)[1].converts


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
