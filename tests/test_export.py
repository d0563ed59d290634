"""A program that is exported computes what the converted model does, and needs nothing of ours."""

from __future__ import annotations

import copy
import io
import logging
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import MatmulCounter
from nets import Net
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from zoo import cases
from zoo.case import exportable, floating_outputs

import amp_graph
import amp_graph.backend.decide as decide
from amp_graph import AmpGraphError, ListError, Override, Policy, PolicyError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

# Of torch.export's difficulties: kinds of operators, of graphs inside graphs, of memory, of sizes.
NAMES = (
    "bert", "checkpointed", "custom_function", "data_dependent_size", "double_part",
    "fourier_filter", "in_place_buffers", "llava", "lstm", "own_autocast", "residual", "swin",
)  # fmt: skip
CASES = [case for case in cases() if case.name in NAMES]


def reloaded(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_computes_what_the_converted_model_does(case: Any) -> None:
    if case.name == "llava" and torch.__version__ < "2.13":
        pytest.skip("torch 2.11 cannot retrace the sizes in it; export says so")
    model = exportable(case.make())
    args, kwargs = case.batch(0, 0)
    program = amp_graph.export(copy.deepcopy(model), args, kwargs, policy="bfloat16")
    loaded = reloaded(program)
    converted = amp_graph.convert(copy.deepcopy(model), policy="bfloat16")
    expected = floating_outputs(converted(*args, **kwargs))
    with MatmulCounter() as counter:
        found = floating_outputs(program.module()(*args, **kwargs))
    assert counter.low_share >= 0.9
    again = floating_outputs(loaded.module()(*args, **kwargs))
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    for ours, saved, theirs in zip(found, again, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(saved, theirs)


class Everything(nn.Module):
    """A keyword, results of several kinds, buffers and a constant, and a conversion of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.shift = torch.randn(4)

    def forward(self, input: Tensor, *, scale: Tensor) -> dict[str, Any]:
        hidden = torch.relu(self.norm(self.conv(input))).mean((2, 3))
        self.calls += 1
        scores = torch.softmax(self.last(hidden) + self.shift, -1) * scale
        return {"scores": scores, "size": input.shape[0], "wide": hidden.to(torch.float64)}


@pytest.mark.parametrize("training", [False, True])
def test_keywords_sizes_buffers_and_results(training: bool) -> None:
    model = Everything().train(training)
    scale = torch.tensor(2.0)
    converted = amp_graph.convert(copy.deepcopy(model), policy="bfloat16")
    program = amp_graph.export(
        model,
        (torch.randn(2, 3, 8, 8),),
        {"scale": scale},
        policy="bfloat16",
        dynamic_shapes={"input": {0: Dim("n")}, "scale": None},
    )
    for exported in (program.module(), reloaded(program).module()):
        twin = copy.deepcopy(converted)
        for size in (5, 3):
            x = torch.randn(size, 3, 8, 8)
            found, expected = exported(x, scale=scale), twin(x, scale=scale)
            assert found.keys() == expected.keys()
            assert found["size"] == size
            for key in ("scores", "wide"):
                assert found[key].dtype is expected[key].dtype
                assert torch.equal(found[key], expected[key])
        buffers = dict(exported.named_buffers())
        for name, buffer in twin.named_buffers():
            assert torch.equal(buffers[name], buffer), name


class Shared(nn.Module):
    """A weight that is read in both precisions, and one under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.scores = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9)
        self.again = nn.Linear(8, 8)
        self.scores.weight, self.again.weight = self.words.weight, self.inner.weight

    def forward(self, i: Tensor) -> Tensor:
        return self.scores(self.again(self.inner(self.words(i))))


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_weights_are_stored_as_they_are_read(compiler: str) -> None:
    model, i = Shared().eval(), torch.arange(9)[None]
    program = amp_graph.export(model, (i,), policy=Policy("bfloat16", compiler=compiler))
    low = {name for name, value in program.state_dict.items() if value.dtype is torch.bfloat16}
    inner = {"inner.weight", "again.weight", "inner.bias", "again.bias"}
    assert low == inner | {"scores.bias"}
    assert program.state_dict["inner.weight"] is program.state_dict["again.weight"]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    converted = amp_graph.convert(model, policy="bfloat16")
    assert torch.equal(program.module()(i), converted(i))


def test_a_converted_model_is_exported_as_it_was_converted() -> None:
    policy = Policy("bfloat16", overrides=(Override("deny", module="first"),))
    model = amp_graph.convert(Net().eval(), policy=policy)
    x = torch.randn(4, 8)
    expected = model(x)
    program = amp_graph.export(model, (x,))
    assert torch.equal(program.module()(x), expected)
    assert program.state_dict["first.weight"].dtype is torch.float32
    assert program.state_dict["second.weight"].dtype is torch.bfloat16
    assert torch.equal(model(x), expected)


def test_a_plan_is_followed_in_its_precision() -> None:
    policy = Policy("float16", overrides=(Override("deny", module="first"),))
    model, x = amp_graph.convert(Net().eval(), policy=policy), torch.randn(4, 8)
    expected = model(x)
    program = amp_graph.export(Net().eval(), (x,), plan=amp_graph.plans(model))
    dtypes = [program.state_dict[f"{name}.weight"].dtype for name in ("first", "second")]
    assert dtypes == [torch.float32, torch.float16]
    assert program.module()(x).dtype is expected.dtype


@pytest.mark.parametrize("is_on", [False, True])
def test_autocast_regions_of_the_model_are_kept(is_on: bool) -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inside = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
                y = torch.tanh(self.inside(x.float()))
            return self.first(x), y

    model, x = Region().eval(), torch.randn(4, 16)
    program = reloaded(amp_graph.export(model, (x,), policy="bfloat16"))
    first, inside = program.module()(x)
    exact = model(x)
    assert inside.dtype is exact[1].dtype and torch.equal(inside, exact[1])
    assert not torch.equal(first, exact[0])


def test_runs_without_this_package(tmp_path: Path) -> None:
    model, x = Net().eval(), torch.randn(4, 8)
    program = amp_graph.export(model, (x,), policy="bfloat16")
    torch.export.save(program, tmp_path / "net.pt2")
    torch.save((x, program.module()(x)), tmp_path / "expected.pt")
    script = (
        "import sys, torch; sys.modules['amp_graph'] = None\n"
        "x, expected = torch.load('expected.pt')\n"
        "assert torch.equal(torch.export.load('net.pt2').module()(x), expected)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)


def test_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 8)
    with pytest.raises(AmpGraphError, match="kwargs: takes arguments by their names, not int 5"):
        amp_graph.export(Net(), (x,), kwargs=5)
    with pytest.raises(AmpGraphError, match=r"args: takes a tuple, .* \(x,\), not Tensor tensor"):
        amp_graph.export(Net(), x)
    with pytest.raises(AmpGraphError, match=r"dynamic_shapes: .* not int 3"):
        amp_graph.export(Net(), (x,), dynamic_shapes=3)
    with pytest.raises(PolicyError, match="output_dtype"):
        amp_graph.export(Net(), (x,), policy=Policy("bfloat16", output_dtype="bfloat16"))

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(decide, "rewrite", fail)
    with pytest.raises(AmpGraphError, match=r"cannot export Net .* planted"):
        amp_graph.export(Net(), (x,))


def test_a_mistake_in_the_lists_is_told_of_before_the_export(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.export, "export", lambda *_, **__: pytest.fail("it was exported"))
    with pytest.raises(ListError, match=r"no operator 'aten.gelo'"):
        amp_graph.export(Net(), (torch.randn(4, 8),), policy=Policy(lists={"deny": ["aten.gelo"]}))


def test_a_model_that_cannot_be_exported_logs_no_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        amp_graph.export(Net(), (torch.randn(4, 3),))
    assert not [record for record in caplog.records if record.name == log.name]


def test_a_failed_export_leaves_no_hook_that_ends_later_graphs() -> None:
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        amp_graph.export(Net(), (torch.randn(4, 3),))
    model = amp_graph.convert(Everything())
    model(torch.randn(2, 3, 8, 8), scale=torch.tensor(2.0))
    assert len(amp_graph.plans(model)) == 1


def test_warns_of_nothing_that_torch_export_does_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp_graph.export(Net().eval(), (torch.randn(2, 8),))
