"""The lines that a script ends with under AMP_GRAPH_ENABLE."""

from __future__ import annotations

import io
from contextlib import redirect_stderr

import pytest
import torch
from counting import CastCounter
from nets import X, net
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amp_graph
from amp_graph.autopatch.exit_report import write_report
from amp_graph.autopatch.script_models import model_of
from amp_graph.autopatch.summary import summary_of
from amp_graph.convert import record_of
from amp_graph.inspection import render


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
    described = summary_of(told).as_json()
    operators = amp_graph.explain(model).data.modules[0].figures.operators
    assert (described["operators_low"], described["operators"]) == (3, 3)
    assert (operators.low, operators.total) == (3, 3)


def report_of(installation, folder=None) -> str:
    written = io.StringIO()
    with redirect_stderr(written):
        write_report(installation.models.seen, folder)
    return written.getvalue()


def test_an_entry_of_the_json_report_has_what_there_is(start):
    installation, model = start(DTYPE="float16"), net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(X).mean().backward()
    optimizer.step()
    net().double()(X.double())
    converted, left_alone = (summary_of(m).as_json() for m in installation.models.seen)
    named = ["model", "spelled", "first_called_at", "alike", "converted"]
    figures = ["graphs", "runs", "operators", "operators_low"]
    casts = ["casts", "cast_bytes", "casts_of_unknown_size"]
    lists, scaled = ["fallbacks", "graph_breaks"], ["loss_scale", "steps_skipped"]
    assert [*converted] == [*named, "dtype", *figures, *casts, *lists, *scaled]
    assert [*left_alone] == [*named, "why"]


def test_a_report_that_nothing_was_converted_says_why(start, tmp_path):
    installation = start()
    assert report_of(installation) == (
        "amp_graph: NOTHING WAS CONVERTED, because no module with parameters was called "
        "in this process by nn.Module.__call__ outside of torch.func, vmap and tracers\n"
    )
    net().double()(X.double())
    why = "NOTHING WAS CONVERTED, because Sequential: its parameters are float64"
    assert why in report_of(installation)
    (tmp_path / "file").touch()
    assert "cannot write to" in report_of(installation, tmp_path / "file" / "folder")


def test_a_script_that_converts_its_model_itself_is_no_cause_for_alarm(start):
    installation, model = start(), net()
    amp_graph.convert(model, policy="bfloat16")(X)
    why = "nothing was converted here, because Sequential: the script converts it itself"
    assert report_of(installation) == f"amp_graph: {why}\n"


class Breaking(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.one(x)
        torch._dynamo.graph_break()
        return self.two(x)


def test_the_report_has_graph_breaks_with_their_lines(start):
    installation, model = start(), Breaking()
    model(X)
    line = Breaking.forward.__code__.co_firstlineno + 2
    text = report_of(installation)
    assert f"graph break at test_exit_report.py:{line}, torch._dynamo.graph_break(): " in text
    assert "Breaking: 2 of 2 operators on bfloat16 tensors" in text


def test_breaks_in_code_that_the_script_compiles_are_not_in_it(start):
    installation, model = start(), nn.Linear(8, 8)

    @torch.compile(backend="eager")
    def compiled(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    model(compiled(X))
    assert "graph break" not in report_of(installation)


class CheckpointedInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return checkpoint(lambda h: self.inner(h).relu(), self.first(x), use_reentrant=False)


class InGraphs(CastCounter):
    """All casts but the refreshing of low-precision weights."""

    def record(self, name, args, result):
        if name != "_foreach_copy_":
            super().record(name, args, result)


def test_casts_inside_of_a_checkpoint_are_in_the_report(start):
    installation, model = start(), CheckpointedInside()
    model(X)
    before = summary_of(installation.models.seen[0]).as_json()
    with InGraphs() as casts:
        model(X)
    after = summary_of(installation.models.seen[0]).as_json()
    assert after["casts"] - before["casts"] == casts.forward.casts == 6
    assert after["cast_bytes"] - before["cast_bytes"] == casts.forward.bytes


class Chosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, mask):
        return self.layer(x[mask]).softmax(-1).sum(0)


def test_casts_of_unknown_size_are_counted_without_bytes(start, capsys):
    installation, model = start(), Chosen()
    model(X, X[:, 0] < 9)
    (plan,) = installation.models.seen[0].record.plans
    assert plan.cast_bytes == 0
    assert f"moving at least {plan.weight_bytes} B" in render(plan)
    assert "size unknown" in render(plan)
    found = summary_of(installation.models.seen[0]).as_json()
    assert found["casts_of_unknown_size"] == found["casts"] == 1
    assert found["cast_bytes"] == 0
    write_report(installation.models.seen, None)
    assert " 1 cast moving at least 0 B" in capsys.readouterr().err


class SparseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return torch.sparse.mm(torch.eye(len(x)).to_sparse(), self.layer(x))


@pytest.mark.filterwarnings("ignore")
def test_the_report_leaves_no_model_out(start):
    installation, tried, model = start(), SparseNet(), net()
    for each in (tried, model):
        each(X)
    first, second = report_of(installation).splitlines()[:2]
    assert first.startswith("amp_graph: SparseNet: nothing was converted, because code between")
    assert second.startswith("amp_graph: Sequential: ")


class Scripted(nn.Module):
    """Around what Dynamo cannot capture."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.part = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.part(torch.relu(self.first(x))))


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_no_line_of_this_package_is_told_of_as_a_break(start):
    installation, model = start(), Scripted()
    for _ in range(3):
        model(X).sum().backward()
    told = report_of(installation)
    assert "test_exit_report.py" in told
    assert "install.py" not in told and "first_call.py" not in told


def test_what_is_the_same_of_parts_that_are_alike_is_said_once(start, capsys):
    start()
    for part in (nn.Tanh, nn.LayerNorm, nn.LayerNorm):
        (part(8) if part is nn.LayerNorm else part())(X)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("amp_graph: nothing of LayerNorm was converted")


class AsksForLow(nn.Module):
    """Takes the precision of what runs under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    @torch.compiler.disable
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        between = self.between(self.first(x))
        return self.last(between.relu()).to(between.dtype)


def test_what_is_the_same_of_several_graphs_is_said_once(start):
    installation, model = start(), AsksForLow()
    for size in (4, 6, 8):
        model.train()(torch.randn(size, 8)).sum().backward()
        with torch.no_grad():
            model.eval()(torch.randn(size, 8))
    (line,) = [line for line in report_of(installation).splitlines() if "not retraced" in line]
    assert line.endswith("graphs)")


class Differentiating(nn.Module):
    """The only graph of it is left to autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(torch.func.grad(lambda rows: rows.square().sum())(x))


def test_runs_of_graphs_that_are_left_to_autocast_are_none_of_captured_ones(start):
    installation, model = start(), Differentiating()
    model(X)
    assert "Differentiating: no captured graph ran" in report_of(installation)


class BreakingToo(Breaking):
    def forward(self, x):
        x = self.two(self.one(x))
        torch._dynamo.graph_break()
        return x + 1


def test_breaks_are_told_of_with_their_model(start):
    installation = start()
    first, second = Breaking(), BreakingToo()
    second(X), first(X), nn.Embedding(4, 3)(torch.arange(3)), nn.Embedding(9, 2)(torch.arange(3))
    lines = [line.removeprefix("amp_graph: ") for line in report_of(installation).splitlines()]
    begins = [line.split(" of ")[0].split(":")[0].split(",")[0] for line in lines]
    assert begins == [
        "Embedding (2 alike)",
        "BreakingToo",
        "  graph break at test_exit_report.py",
        "Breaking",
        "  graph break at test_exit_report.py",
    ]
