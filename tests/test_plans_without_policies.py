"""Plans followed without the policy that they were made under, and colours without a kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nets import Net
from saved_plans import color, edit
from torch import nn

import amp_graph
from amp_graph import Override, PlanError, Policy

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Inverse(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(self.first(x)[:, :4])


def test_a_colour_without_a_kernel(tmp_path: Path) -> None:
    """PyTorch refuses inverses in low precision, on fake tensors as well."""
    x, file = torch.randn(4, 8), tmp_path / "plan.json"
    model = amp_graph.convert(Inverse().eval(), policy="bfloat16", example_inputs=(x,))
    amp_graph.save_plan(amp_graph.plans(model), file)
    for wanted in ("allow", "infer"):
        edit(file, color("linalg_inv", wanted))
        with pytest.raises(PlanError, match=f"'linalg_inv' cannot be {wanted}.*no kernel"):
            amp_graph.convert(Inverse().eval(), plan=file, example_inputs=(x,))


class Shared(Net):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        doubled = self.second(x) * 2
        return doubled, doubled.view(-1)


def test_an_override_of_shared_memory_comes_back(tmp_path: Path) -> None:
    """An operator whose result shares its memory with an output may be low: it is cast there."""
    x, file = torch.randn(4, 16), tmp_path / "plan.json"
    policy = Policy(dtype="bfloat16", overrides=(Override("allow", op="aten.mul"),))
    model = amp_graph.convert(Shared().eval(), policy=policy, example_inputs=(x,))
    (plan,) = amp_graph.plans(model)
    assert "mul" in plan.low
    amp_graph.save_plan(plan, file)
    torch._dynamo.reset()
    again = amp_graph.convert(Shared().eval(), plan=file, example_inputs=(x,))
    assert amp_graph.plans(again)[0].low == plan.low


class Attends(Net):
    """Attention that a kernel of PyTorch's would compute in float32 inside on a CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.first(x).view(1, 2, 4, 8)
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=self.second.bias)


def test_attention_is_split_or_whole_as_in_the_plan(tmp_path: Path) -> None:
    x, file, denied = (
        torch.randn(4, 8),
        tmp_path / "plan.json",
        Override("deny", op="aten.scaled_dot_product_attention"),
    )
    for policy in (Policy(level="safe"), Policy(overrides=(denied,)), Policy()):
        model = amp_graph.convert(Attends(), policy=policy, example_inputs=(x,))
        (plan,) = amp_graph.plans(model)
        amp_graph.save_plan(plan, file)
        for follows in (Policy(), Policy(level="safe"), Policy(overrides=(denied,))):
            torch._dynamo.reset()
            again = amp_graph.convert(Attends(), policy=follows, plan=file, example_inputs=(x,))
            assert amp_graph.plans(again)[0].low == plan.low
