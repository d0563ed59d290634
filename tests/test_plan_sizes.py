"""Plans that are followed at other sizes than they were saved at."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_plans import edit
from torch import nn

import amp_graph
from amp_graph import ConversionWarning, PlanError
from amp_graph.calls.capture_cache import clear
from amp_graph.ir import Color, Paint

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Pooled(nn.Module):
    """With symbolic sizes it has nodes for them, and slices that else are none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[:, 0])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("lengths", [(4, 6), (6, 4), (4, 6, 9)])
def test_sizes_that_are_symbolic_are_no_other_computation(
    lengths: tuple[int, ...], training: bool
) -> None:
    """The plan is that of the last length, which is symbolic, or of the only one."""
    inputs = {n: torch.randn(2, n, 8) for n in lengths}
    model = amp_graph.convert(Pooled().train(training), policy="bfloat16")
    for n in lengths[1:]:
        model(inputs[n])
    plan = amp_graph.plans(model)[-1]
    denied = replace(plan, paints=plan.paints | {"linear": Paint(Color.DENY, "by hand")})
    torch._dynamo.reset()
    clear()
    again = amp_graph.convert(Pooled().train(training), plan=denied)
    for n in lengths:
        again(inputs[n])
    assert len(amp_graph.plans(again)) == 2
    for found in amp_graph.plans(again):
        allowed = [n for n, p in found.paints.items() if p.color is Color.ALLOW]
        assert len(allowed) == len([n for n, p in denied.paints.items() if p.color is Color.ALLOW])
        assert found.paints["linear"].color is Color.DENY


class Decodes(nn.Module):
    """Of one token, what its heads give is in order, and `reshape` no copy."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.first(x).view(2, -1, 2, 4).transpose(1, 2)
        return self.last(torch.relu(heads).transpose(1, 2).contiguous().reshape(2, -1, 8))


@pytest.mark.parametrize(("saved_at", "run_at"), [(5, 1), (1, 5)])
def test_a_copy_that_a_size_does_without_is_no_other_computation(
    saved_at: int, run_at: int
) -> None:
    model = amp_graph.convert(Decodes(), policy="bfloat16")
    model(torch.randn(2, saved_at, 8))
    plan = amp_graph.plans(model)[0]
    torch._dynamo.reset()
    clear()
    amp_graph.convert(Decodes(), plan=plan)(torch.randn(2, run_at, 8))


class Counts(nn.Module):
    """Writes into what it is given, and returns a view of it: both stay in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor, total: torch.Tensor) -> Any:
        total.add_(self.layer(x).mean(0))
        return self.norm(self.layer(x)), x.t()


@pytest.mark.parametrize(
    ("node", "why"), [("add_", "writes into: total"), ("t", "output shares memory with: x")]
)
def test_a_colour_that_cannot_be_is_told_of_at_other_sizes_and_in_the_other_mode(
    node: str, why: str, tmp_path: Path, recwarn
) -> None:
    model, file = amp_graph.convert(Counts(), policy="bfloat16"), tmp_path / "plan.json"
    model(torch.randn(4, 8), torch.zeros(8))
    amp_graph.save_plan(amp_graph.plans(model), file)

    def allow(table: Any) -> None:
        table["plans"][0]["paints"][node]["color"] = "allow"

    edit(file, allow)
    said = f"'{node}' cannot be allow, it is deny ({why}). Set it back to deny."
    inputs = torch.randn(4, 8), torch.zeros(8)
    with pytest.raises(PlanError, match=re.escape(said)):
        amp_graph.convert(Counts(), plan=file, example_inputs=inputs)
    assert not recwarn.list
    said = f"plan.json: '{node}' is deny ({why}), not allow, in a graph of another size"
    for rows, training in ((3, True), (4, False)):
        with pytest.warns(ConversionWarning, match=re.escape(said)):
            model = amp_graph.convert(Counts().train(training), plan=file)
            model(torch.randn(rows, 8), torch.zeros(8))
