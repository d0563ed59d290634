"""The report: its figures equal what a run dispatches, and it says what could be changed."""

from __future__ import annotations

import builtins
import io
import json
import logging
import logging.handlers
import re
from collections import Counter
from typing import Any

import pytest
import torch
from counting import LOW, tensors
from expecttest import assert_expected_inline
from nets import Net
from rich.console import Console
from torch import fx, nn
from torch.nn import functional as F

import amp_graph
from amp_graph import AmpGraphError, ConversionWarning, Override, Policy

CAST = torch.ops.aten._to_copy.default

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Mixed(nn.Module):
    """One of everything that a report speaks of."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.first(x))
        spread = F.gelu(hidden.exp() + 1)
        unknown = torch.cummax(self.second(spread), dim=1).values
        return self.first(unknown)


class Broken(Mixed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        print(end="")
        return super().forward(hidden)


class Operators(fx.Interpreter):
    """Counts what runs on float32 or low tensors, and the bytes of results with own memory."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.count: Counter[bool] = Counter()
        self.bytes: Counter[bool] = Counter()

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_function(target, args, kwargs)
        if (
            not isinstance(target, torch._ops.OpOverload)
            or target is torch.ops.aten._to_copy.default
        ):
            return result
        memory = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))}
        results = [t for t in tensors(result) if t.is_floating_point()]
        if any(t.is_floating_point() for t in tensors((args, kwargs, result))):
            self.count[any(t.dtype in LOW for t in tensors((args, result)))] += 1
        for tensor in results:
            if tensor.untyped_storage().data_ptr() not in memory:
                self.bytes[tensor.dtype in LOW] += tensor.numel() * tensor.element_size()
        return result


def test_operators_and_activation_bytes_equal_those_of_a_run() -> None:
    x = torch.randn(4, 8)
    model = amp_graph.convert(Mixed().eval(), policy="bfloat16")
    with torch.no_grad():
        model(x)
    _, emitted = model.__dict__["_call_impl"].compiler.graphs[0]
    values = dict(model.named_parameters())
    inputs = [
        values.get(n.name.partition("modules_")[2].replace("_parameters_", ".").rstrip("_"), x)
        for n in emitted.graph.nodes
        if n.op == "placeholder"
    ]
    ran = Operators(emitted)
    with torch.no_grad():
        ran.run(*inputs)
    whole = amp_graph.explain(model).data.modules[0].figures
    assert whole.operators.low == ran.count[True]
    assert whole.operators.total == ran.count.total()
    assert whole.bytes.low == ran.bytes[True]
    assert whole.bytes.total == ran.bytes.total()


def test_a_report_is_saved_and_shows_itself_as_it_prints(tmp_path) -> None:
    model = amp_graph.convert(Mixed(), policy="bfloat16")
    model(torch.randn(4, 8))
    report = amp_graph.explain(model)
    report.save(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["model"] == "Mixed"
    with pytest.raises(AmpGraphError, match="cannot be written"):
        report.save(tmp_path / "none" / "report.json")
    shown = io.StringIO()
    Console(file=shown, width=report.WIDTH, color_system=None).print(report)
    assert repr(report) == str(report)
    assert [line.rstrip() for line in shown.getvalue().splitlines()] == str(report).splitlines()


def test_the_text_of_a_report() -> None:
    model = amp_graph.convert(
        Mixed(), policy=Policy(dtype="bfloat16", overrides=(Override("deny", module="second"),))
    )
    model(torch.randn(4, 8))
    assert_expected_inline(
        re.sub(r"(?<=test_explain.py:)\d+", "LINE", str(amp_graph.explain(model))),
        """\
Mixed in bfloat16
38% of operators and 67% of FLOPs on low-precision tensors, 23% of activation bytes in low precision; 1 graph

On low-precision tensors, by module
  module    operators  FLOPs              activations
  Mixed           3/8    67%  1.54 kFLOP          23%  832 B
    first         2/2   100%  1.02 kFLOP         100%  128 B
    second        0/1     0%    512 FLOP           0%  128 B

Casts: 6, moving 1.2 KiB
  value         to        bytes  because
  first.weight  bfloat16  384 B  linear and 1 more take bfloat16 (listed: matmul)
  x             bfloat16  192 B  linear takes bfloat16 (listed: matmul)
  gelu          float32   192 B  exp takes float32 (listed: exponentials)
  getitem       bfloat16  192 B  linear_2 takes bfloat16 (listed: matmul)
  linear_2      float32   192 B  output takes float32 (as captured: output)
  first.bias    bfloat16   48 B  linear and 1 more take bfloat16 (listed: matmul)

Most rewarding changes
  1. an override keeps operators in float32: module=second
     would free 2 operators, 400 B less for them to move, 432 B more for casts, 512 FLOP in low precision
     remove the override, or narrow it for a part of that
""",  # noqa: E501
    )


def test_breaks_and_fallbacks_are_named() -> None:
    model = amp_graph.convert(Broken(), policy="bfloat16")
    model(torch.randn(4, 8))
    text = str(amp_graph.explain(model))
    assert "Graph breaks" in text and re.search(r"graph \d .* B  test_explain\.py:\d+\n", text)
    assert "test_explain.py:" in text and "print" in text
    wrapped = amp_graph.convert(Net(), policy="bfloat16")
    wrapped(torch.randn(4, 8))
    with pytest.warns(ConversionWarning):
        wrapped.__dict__["_call_impl"].compiler.record.fall_back(0, "planted")
    text = str(amp_graph.explain(wrapped))
    assert "graph 0 runs as captured: planted" in text
    assert "0% of operators" in text


class Unrolled(nn.Module):
    """A weight with more readers than share a cast for their gradients."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(4, 8)

    def forward(self, x):
        state = x.new_zeros(2, 8), x.new_zeros(2, 8)
        for _ in range(40):
            state = self.cell(x, state)
        return state[0]


def test_casts_of_one_weight_are_one_copy():
    model = amp_graph.convert(Unrolled(), policy="bfloat16")
    model(torch.ones(2, 4))
    data = amp_graph.explain(model).data
    of_weight = [c for c in data.casts if c.value == "cell.weight_hh"]
    assert [(c.bytes, c.dtype) for c in of_weight] == [(8 * 32 * (4 + 2), "bfloat16")]
    assert of_weight[0].why == "linear and 39 more take bfloat16 (listed: matmul)"
    (graph,) = data.graphs
    assert graph.casts == len(data.casts) and graph.cast_bytes == sum(c.bytes for c in data.casts)
    (plan,) = amp_graph.plans(model)
    assert plan.weight_bytes == sum(p.numel() for p in model.parameters()) * (4 + 2)


def test_what_the_figures_leave_out_is_said() -> None:
    class Skips(Net):
        @torch._dynamo.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    for make, is_whole in ((Net, True), (Skips, False)):
        model = amp_graph.convert(nn.Sequential(make()), policy="bfloat16")
        for _ in range(2):
            model(torch.randn(4, 8))
        report = amp_graph.explain(model)
        for text in (" ".join(str(report).split()), report._repr_html_()):
            assert ("code that is not captured is not counted" not in text) == is_whole


def test_a_notebook_shows_names_as_text() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("<script>alert(1)</script>", nn.Linear(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return next(self.children())(x)

    model = amp_graph.convert(Odd())
    model(torch.randn(4, 8))
    html = amp_graph.explain(model)._repr_html_()
    assert "<script>" not in html and "&lt;script&gt;alert(1)" in html


def test_the_text_of_a_report_is_the_same_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich finds out by this name of IPython's that it is in one, and displays what it prints;
    IPython asks for colours."""

    class ZMQInteractiveShell:
        pass

    model = amp_graph.convert(Net())
    model(torch.randn(4, 8))
    text = str(amp_graph.explain(model))
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert str(amp_graph.explain(model)) == text and "On low-precision tensors, by module" in text


def test_what_there_is_no_report_of() -> None:
    with pytest.raises(AmpGraphError, match="not converted"):
        amp_graph.explain(Net())
    with pytest.raises(AmpGraphError, match="call it once"):
        amp_graph.explain(amp_graph.convert(Net()))
    for depth in ("a", -1):
        with pytest.raises(AmpGraphError, match="depth is how many levels of modules to show"):
            amp_graph.explain(Net(), depth=depth)


def test_a_model_to_be_captured_anew_has_the_report_of_before() -> None:
    model = amp_graph.convert(Net(), policy="bfloat16")
    model(torch.randn(4, 8))
    before = str(amp_graph.explain(model))
    model.register_forward_hook(lambda *given: None)
    with pytest.raises(RuntimeError):
        model(torch.randn(4, 3))
    assert str(amp_graph.explain(model)) == before


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> list[torch.Tensor]:
        return [part.sum(0) for part in torch.split(self.layer(x), sizes.tolist())]


def test_sizes_that_depend_on_data_are_explained_without_tracebacks() -> None:
    model = amp_graph.convert(Parts())
    model(torch.randn(6, 8), torch.tensor([2, 4]))
    log, records = (
        logging.getLogger("torch._subclasses.fake_tensor"),
        logging.handlers.BufferingHandler(99),
    )
    log.addHandler(records)
    try:
        text = str(amp_graph.explain(model))
    finally:
        log.removeHandler(records)
    assert "100% of FLOPs" in text
    assert not records.buffer


def test_names_of_modules_do_not_move_the_cursor() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("a\nb\x1b[31m", nn.Linear(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.children():
                x = layer(x)
            return x

    model = amp_graph.convert(Odd(), policy="bfloat16")
    model(torch.randn(4, 8))
    for text in (amp_graph.render(amp_graph.plans(model)[0]), str(amp_graph.explain(model))):
        assert "\x1b" not in text and r"a\nb\x1b[31m" in text
