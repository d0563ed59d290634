"""The benchmark measures what it says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from cuda_autocast import autocast_casts
from rich.console import Console
from torch import nn

import amp_graph
from amp_graph.calls.conversion import conversion_of

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

from bench import measure
from bench_counters import Launches, Saved
from bench_cuda_rules import CudaRules
from bench_models import WORKLOADS, images, sequences, vision, workload_of
from bench_report import first_call_table, plot, step_table
from bench_variants import Settings

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (vision.resnet50, 25_557_032),
        (lambda: vision.resnet50(32, 4), 25_028_904),
        (lambda: sequences.GPT(50257, 768, 12, 1024), 124_439_808),
        (lambda: sequences.Bert(30522, 1024, 24, 512), 335_174_458),
    ],
    ids=["resnet-50", "resnext-50 32x4d", "gpt-2", "bert-large"],
)
def test_models_of_real_size_have_the_published_number_of_parameters(
    make: Callable[[], nn.Module], count: int
) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in make().parameters()) == count


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_parameter_of_a_small_model_is_trained(name: str) -> None:
    work = workload_of(name, "cpu", False)
    work.loss(work.model).backward()
    for path, parameter in work.model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), path


def test_the_rules_for_cuda_are_those_of_autocast() -> None:
    """The stand-in casts as often and as much as PyTorch does for fake tensors on CUDA."""
    models = {
        "gpt": (sequences.GPT(50, 128, 2, 16, sequences.Explicit), torch.randint(0, 50, (2, 16))),
        "unet": (images.SmallUNet(), torch.randn(2, 3, 16, 16)),
        "resnet": (vision.Residual(3, 8, 2), torch.randn(2, 3, 16, 16)),
    }
    for name, (model, x) in models.items():
        with Launches() as launches, CudaRules(torch.float16):
            model(x)
        amp_graph.convert(model, policy="float16")(x)
        ((captured, _),) = conversion_of(model).compiler.graphs
        expected = autocast_casts(captured, torch.float16)
        found = launches.counters
        assert (found.casts, found.cast_bytes) == (expected.count, expected.bytes), name


def test_bytes_kept_for_backward_are_those_of_distinct_memory() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    saved = Saved()
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda t: t):
        model(x)
    assert sum(saved.memory.values()) == 4 * 8 * 4  # of tanh; weights and data live on anyway


def test_what_is_measured_is_shown() -> None:
    result = measure("ncf", Settings(turns=2, accumulate=2, emulate_cuda=True))
    variants = ["float32", "autocast", "amp_graph", "pure low"]
    assert list(result["seconds"]) == variants
    error = result["gradient_error"]
    assert error["float32"] == 0 and all(0 < error[v] < 0.5 for v in variants[1:])
    counters, first = result["counters"], result["first_call"]
    assert counters["float32"]["casts"] == 0 < counters["amp_graph"]["casts"]
    assert counters["amp_graph"]["casts"] < counters["autocast"]["casts"]
    peaks = {v: counters[v]["peak_bytes"] for v in variants}
    assert 0 < peaks["pure low"] < peaks["float32"]
    assert all(first[v]["capture"] == 0 for v in variants if v != "amp_graph")
    mine = first["amp_graph"]
    assert mine["rewrite"] > 0 and mine["capture"] > 0
    assert mine["capture"] + mine["rewrite"] + mine["compile"] <= mine["total"]
    console = Console(width=250, record=True)
    console.print(step_table([result]), first_call_table([result]))
    shown = console.export_text()
    assert all(f"│ {v}" in shown for v in variants)
    texts = [e.text for e in ElementTree.fromstring(plot([result], "a & b")).iter()]
    assert "a & b" in texts and "ncf" in texts and "amp_graph" in texts
