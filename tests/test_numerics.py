"""Comparison of precisions: right figures, found faults."""

from __future__ import annotations

import io
import json
import random
import xml.etree.ElementTree
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from nets import Net
from planted import Planted, inputs
from rich.console import Console
from torch import nn

import amp_graph
from amp_graph.numerics.statistics import exponents, statistics
from amp_graph.numerics.watched_graph import WatchedGraph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_statistics_of_numbers_by_hand() -> None:
    reference = torch.tensor([1.0, 1e-9, 7e4, 0.0, -2.0])
    found = statistics(reference, reference.half())
    assert (found.underflow, found.overflow, found.count) == (0.2, 0.2, 5)
    assert (found.smallest, found.largest) == (0, 1)
    assert found.error == float("inf")
    near = statistics(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
    assert near.error == pytest.approx(0.1)
    assert statistics(torch.zeros(2), torch.zeros(2)).error == 0
    assert statistics(torch.zeros(0), torch.zeros(0)).count == 0
    infinite = torch.tensor([float("-inf"), 1.0])
    assert statistics(infinite, infinite).error == 0


def test_complex_values_count_both_parts() -> None:
    reference = torch.tensor([3.0 + 4.0j])
    found = statistics(reference, reference + 0.5j)
    assert (found.error, found.count) == (pytest.approx(0.1), 2)


class Uncaptured(nn.Module):
    """A break out of a loop that depends on data: Dynamo leaves such code alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.mean() > 10:
                break
        return x


@pytest.mark.parametrize("look", [amp_graph.compare, amp_graph.find_nonfinite])
def test_what_cannot_be_captured_is_not_reported_as_exact(look: Any) -> None:
    with pytest.raises(amp_graph.AmpGraphError, match="Uncaptured cannot be captured"):
        look(Uncaptured(), inputs(), policy="bfloat16")


class Augmenting(Net):
    """Draws from the generators of Python and of NumPy."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, scale) + random.random() + float(np.random.rand())


def test_both_runs_draw_the_same_numbers() -> None:
    states = random.getstate(), np.random.get_state()[1].tolist()
    found = amp_graph.compare(nn.DataParallel(Augmenting().eval()), inputs(), policy="bfloat16")
    assert found.outputs < 0.02
    assert states == (random.getstate(), np.random.get_state()[1].tolist())


def test_exponents() -> None:
    values = torch.tensor([1.0, 1.5, -2.0, 0.25, 0.0, float("inf"), float("nan")])
    assert exponents(values) == {0: 2, 1: 1, -2: 1}


def test_the_figures_are_those_of_two_runs_by_hand() -> None:
    model, x = Net().eval(), torch.randn(4, 8)
    plain = model(x)
    plain.square().mean().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    amp_graph.convert(model, policy="bfloat16")
    mixed = model(x)
    mixed.square().mean().backward()
    ours = [p.grad.clone() for p in model.parameters()]
    comparison = amp_graph.compare(model, x)
    assert comparison.outputs == pytest.approx(
        float((mixed - plain).double().norm() / plain.double().norm())
    )
    r, m = (torch.cat([g.double().flatten() for g in gs]) for gs in (gradients, ours))
    assert comparison.gradients == pytest.approx(float((m - r).norm() / r.norm()))
    assert [n.node for n in comparison.nodes] == ["linear", "batch_norm", "relu", "linear_1", "mul"]
    assert comparison.nodes[-1].forward.error == pytest.approx(comparison.outputs)
    assert all(n.backward is not None for n in comparison.nodes)
    first = comparison.first_above(1e-4)
    assert first is not None and first.node == "linear"
    assert first.added == first.forward.error


def test_a_graph_whose_kernel_is_missing_runs_as_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    run_node = WatchedGraph.run_node

    def missing(self, n):
        if n.name.endswith("_bfloat16"):
            raise RuntimeError("not implemented for 'BFloat16'")
        return run_node(self, n)

    monkeypatch.setattr(WatchedGraph, "run_node", missing)
    comparison = amp_graph.compare(Net(), torch.randn(4, 8), policy="bfloat16")
    assert (comparison.outputs, comparison.gradients) == (0, 0)


def test_the_report_fits_narrow_terminals() -> None:
    comparison = amp_graph.compare(Planted("overflow"), inputs(), policy="float16")
    texts = []
    for width in (80, 130):
        console = Console(width=width, file=io.StringIO())
        console.print(comparison)
        texts.append(console.file.getvalue())
    assert "module" not in texts[0] and "module" in texts[1]
    assert all("mul " in text and "planted.py:" in text for text in texts)


def test_equal_runs_have_no_error() -> None:
    policy = amp_graph.Policy(dtype="bfloat16", keep_float32=("first", "second"))
    comparison = amp_graph.compare(Net(), torch.randn(4, 8), policy=policy)
    assert (comparison.outputs, comparison.gradients) == (0, 0)
    assert comparison.worst(1)[0].badness == (False, 0, 0)


def test_a_planted_overflow_is_the_worst_node() -> None:
    comparison = amp_graph.compare(Planted("overflow"), inputs(), policy="float16")
    worst = comparison.worst(1)[0]
    assert (worst.node, worst.code) == ("mul", "x = x * 6e4")
    assert worst.forward.overflow > 0.1 and worst.forward.error == float("inf")
    assert comparison.outputs == float("inf")
    assert "mul" in str(comparison) and "infinite" in str(comparison)


def test_a_planted_underflow_is_on_top() -> None:
    comparison = amp_graph.compare(Planted("underflow"), inputs(), policy="float16")
    lost = comparison.underflows(1)[0]
    assert lost.code == "x = x * 1e-4 * 1e-4"
    assert lost.forward.underflow > 0.1


def test_small_gradients_underflow_without_a_scale_and_not_with_one() -> None:
    def tiny(y: torch.Tensor) -> torch.Tensor:
        return y.square().mean() * 1e-6

    model = amp_graph.convert(Net().eval(), policy="float16")
    without = amp_graph.compare(model, torch.randn(4, 8), loss=tiny)
    scaled = amp_graph.compare(model, torch.randn(4, 8), loss=tiny, loss_scale=2.0**16)
    assert without.gradients > 0.05 > scaled.gradients
    assert without.underflows() and not scaled.underflows()
    assert min(scaled.gradient_exponents) == pytest.approx(
        min(without.gradient_exponents) + 16, abs=3
    )


def test_the_table_has_every_number_in_full_beside_long_names() -> None:
    comparison = amp_graph.compare(Planted("overflow"), inputs(), policy="float16")
    file = f"{'far' * 20}.py:7 forward"
    nodes = tuple(replace(n, label=n.node * 20, source=file) for n in comparison.nodes)
    short, long = str(comparison), str(replace(comparison, nodes=nodes))
    for n in comparison.worst(3):
        assert f"{n.forward.error:.2g}".replace("inf", "infinite") in long and n.dtype in long
    assert long.count("%") == short.count("%")
    assert "farfar.py:7" in long and max(map(len, long.splitlines())) <= 120


def test_files(tmp_path: Path) -> None:
    comparison = amp_graph.compare(Planted("overflow"), inputs(), policy="float16")
    comparison.save(tmp_path / "c.json")
    table = json.loads((tmp_path / "c.json").read_text())
    assert table["format"] == "amp_graph comparison" and table["outputs"] == "Infinity"
    assert [n["node"] for n in table["nodes"]] == [n.node for n in comparison.nodes]
    comparison.plot(tmp_path / "c.svg")
    drawing = xml.etree.ElementTree.parse(tmp_path / "c.svg")
    assert "float16's normal range" in " ".join(drawing.getroot().itertext())


@pytest.mark.parametrize("name", ["gpt2", "lstm", "swin", "checkpointed", "custom_function"])
def test_models_of_the_zoo(name: str) -> None:
    case = next(c for c in zoo.cases() if c.name == name)
    args, kwargs = case.batch(0, 0)
    comparison = amp_graph.compare(case.make(), kwargs or args, loss=case.loss, policy="bfloat16")
    assert 0 < comparison.gradients < 0.2
    assert len(comparison.nodes) > 1


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(self.layer(x))


def test_complex_outputs_have_errors() -> None:
    torch.manual_seed(0)
    model, x = Spectrum(), torch.randn(8, 16)
    found = amp_graph.compare(model, x, policy="bfloat16")
    expected, result = model(x), amp_graph.convert(model, policy="bfloat16")(x)
    error = float((result - expected).norm() / expected.norm())
    assert found.outputs == pytest.approx(error, rel=1e-2) and found.gradients > 0


def test_sparse_gradients_are_compared_as_dense_ones() -> None:
    def model(sparse: bool) -> nn.Module:
        torch.manual_seed(0)
        words = nn.Embedding(20, 16, sparse=sparse)
        return nn.Sequential(words, nn.Flatten(), nn.Linear(48, 4))

    batch = torch.arange(12).view(4, 3)
    found = [amp_graph.compare(model(sparse), batch, policy="bfloat16") for sparse in (False, True)]
    assert found[0].gradients == found[1].gradients > 0
    assert amp_graph.find_nonfinite(model(True), batch, policy="float16") is None


def test_a_nan_that_precision_makes_is_found_where_its_infinities_are() -> None:
    found = amp_graph.find_nonfinite(Planted("nan"), inputs(), policy="float16")
    assert found is not None and found.code == "x = (x * 3e4 - x * 2e4) * 1e-4"
    assert (found.operator, found.in_float32) == ("aten.mul.Tensor", False)


class Chosen(nn.Module):
    """How many numbers it returns depends on what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 400)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).flatten()
        return y[y > 0.5]


def test_outputs_of_different_sizes_are_infinitely_far_apart() -> None:
    torch.manual_seed(0)
    found = amp_graph.compare(Chosen(), torch.randn(16, 16), policy="bfloat16")
    assert found.outputs == float("inf")


@dataclass
class Found:
    boxes: torch.Tensor


class Detects(nn.Module):
    """Returns a list of objects, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> list[Found]:
        return [Found(self.linear(x))]


def test_tensors_in_objects_in_lists_are_compared() -> None:
    found = amp_graph.compare(Detects(), torch.randn(8, 16), policy="bfloat16")
    assert 0 < found.outputs < 0.1 and 0 < found.gradients < 0.1
    infinite = torch.full((8, 16), float("inf"))
    assert amp_graph.find_nonfinite(Detects(), infinite, policy="bfloat16") is not None


class Called:
    def __init__(self, boxes: torch.Tensor) -> None:
        self.boxes = boxes

    def __call__(self) -> None: ...


@pytest.mark.parametrize("hold", [Called, lambda boxes: MappingProxyType({"boxes": boxes})])
def test_tensors_in_what_is_called_or_only_read_are_compared(hold: Any) -> None:
    class Holds(Detects):
        def forward(self, x: torch.Tensor) -> Any:
            return hold(self.linear(x))

    found = amp_graph.compare(Holds(), torch.randn(8, 16), policy="bfloat16")
    assert 0 < found.outputs < 0.1 and 0 < found.gradients < 0.1
