"""The figures of `explain` are those of a run."""

from __future__ import annotations

import copy
import itertools
import re
import warnings
from typing import Any

import pytest
import torch
import zoo
from counting import LOW, CastCounter, tensors
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import amp_graph
from amp_graph import ConversionWarning
from amp_graph.inspection import flops as by_formula
from amp_graph.inspection.flops import FORMULAS

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class FlopsByPrecision(TorchDispatchMode):
    """Counts by torch's formulas, apart for operators with low-precision operands."""

    def __init__(self) -> None:
        super().__init__()
        self.low = self.total = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        packet = getattr(func, "_overloadpacket", None)
        if packet in FORMULAS:
            flops = FORMULAS[packet](*(getattr(a, "shape", a) for a in args))
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        else:
            return result
        self.total += flops
        self.low += flops * any(t.dtype in LOW for t in tensors(args))
        return result


def converted(case: zoo.Case, dtype: str = "bfloat16") -> tuple[nn.Module, Any]:
    model = amp_graph.convert(case.make().eval(), policy=dtype)
    args, kwargs = case.batch(0, 0)

    def run() -> None:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", ConversionWarning)
            model(*args, **kwargs)

    run()
    return model, run


@pytest.mark.parametrize(
    "name",
    "linear convnet residual lstm gpt2 t5 vit swin bert checkpointed custom_function".split(),
)
def test_figures_equal_what_a_run_dispatches(name: str) -> None:
    case = next(c for c in zoo.cases() if c.name == name)
    model, run = converted(case)
    report = amp_graph.explain(model).data
    with FlopsByPrecision() as flops:
        run()
    with CastCounter() as casts:
        run()
    whole = report.modules[0].figures
    assert (whole.flops.low, whole.flops.total) == (flops.low, flops.total)
    assert sum(g.casts for g in report.graphs) == len(report.casts) == casts.forward.casts
    assert sum(c.bytes for c in report.casts) == casts.forward.bytes


RECURRENT = {
    "lstm": nn.LSTM(8, 16),
    "deep lstm": nn.LSTM(8, 16, num_layers=3, bidirectional=True, batch_first=True),
    "projected": nn.LSTM(8, 16, num_layers=2, proj_size=4, bias=False),
    "gru": nn.GRU(8, 16, bidirectional=True),
    "rnn": nn.RNN(8, 16, num_layers=2),
}


def flops_of_steps(layer: nn.Module, given: Any) -> int:
    """What torch counts where the layer runs cell by cell."""
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False), counter:
        layer(given)
    return counter.get_total_flops()


def test_layers_that_repeat_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is as deep takes as long, but for the first of each kind; and others are apart."""
    counted: list[Any] = []
    count = by_formula._counted
    monkeypatch.setattr(by_formula, "_counted", lambda node: counted.append(node) or count(node))

    def total(sizes: list[int]) -> int:
        counted.clear()
        layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
        model = amp_graph.convert(nn.Sequential(*layers), policy="bfloat16")
        model(torch.randn(3, sizes[0]))
        return amp_graph.explain(model).data.modules[0].figures.flops.total

    assert total([8, 8, 8, 8]) == 3 * 2 * 3 * 8 * 8
    few = len(counted)
    assert total([8] * 12) == 11 * 2 * 3 * 8 * 8
    assert len(counted) == few
    assert total([8, 8, 4, 8]) == 2 * 3 * (8 * 8 + 8 * 4 + 4 * 8)


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_recurrent_layers_count_what_their_cells_do(name: str, dtype: str) -> None:
    layer, x = RECURRENT[name].eval(), torch.randn(5, 3, 8)
    model = amp_graph.convert(nn.Sequential(copy.deepcopy(layer)), policy=dtype)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConversionWarning)
        model(x)
    flops = amp_graph.explain(model).data.modules[0].figures.flops
    assert flops.low == flops.total == flops_of_steps(layer, x) > 0


@pytest.mark.parametrize("name", RECURRENT)
def test_the_formulas_of_fused_recurrent_layers(name: str) -> None:
    """Also where sequences are packed: their steps are rows then."""
    layer, aten = RECURRENT[name], torch.ops.aten
    weights = [p.shape for p in layer.parameters()]
    packed = nn.utils.rnn.pack_sequence([torch.randn(n, 8) for n in (4, 2, 1)])
    for given in (torch.randn(5, 3, 8), packed):
        x = given.data.shape
        for flops in (
            FORMULAS[aten._cudnn_rnn](x, weights, 4, None, x),
            FORMULAS[aten.miopen_rnn](x, weights, 4, x),
            FORMULAS[aten._lstm_mps](x, [x], weights, True),
        ):
            assert flops == flops_of_steps(layer, given) > 0


def test_what_no_formula_counts_is_a_dash() -> None:
    model = amp_graph.convert(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), policy="bfloat16")
    model(torch.randn(4, 8))
    report = amp_graph.explain(model)
    (line,) = (line for line in str(report).splitlines() if re.match(" +1 ", line))
    assert line.split()[2:4] == ["–", "–"]
    for shown in (str(report), report._repr_html_()):
        assert "–" in shown and "512 FLOP" in shown and "0 FLOP" not in shown


def test_modules_deeper_than_asked_are_left_out() -> None:
    case = next(c for c in zoo.cases() if c.name == "bert")
    model, _ = converted(case)
    for depth in (0, 2):
        text = str(amp_graph.explain(model, depth=depth))
        assert ("encoder" in text.partition("Casts")[0]) == (depth > 0)


def test_numbers_that_depend_on_data_are_not_asked_for() -> None:
    class Until(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
            return self.layer(x).sum() + torch.arange(0, end.ceil().item()).sum()

    model = amp_graph.convert(Until(), policy="bfloat16")
    model(torch.randn(6, 8), torch.tensor(2.5))
    assert amp_graph.explain(model).data.modules[0].figures.flops.total == 2 * 6 * 8 * 8
