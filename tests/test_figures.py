"""The figures of `explain` are those of a run."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import zoo
from counting import LOW, CastCounter, tensors
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import amp_graph
from amp_graph import ConversionWarning
from amp_graph.inspection.flops import attention_flops

CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


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
        if packet is CPU_ATTENTION:
            flops = attention_flops(*(a.shape for a in args[:3]))
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


def test_modules_deeper_than_asked_are_left_out() -> None:
    case = next(c for c in zoo.cases() if c.name == "bert")
    model, _ = converted(case)
    for depth in (0, 2):
        text = str(amp_graph.explain(model, depth=depth))
        assert ("encoder" in text.partition("Casts")[0]) == (depth > 0)
