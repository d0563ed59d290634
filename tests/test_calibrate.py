"""Calibration: a bound that is met, and nothing denied in vain."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nets import Net
from planted import Planted, inputs
from torch import nn

import amp_graph
from amp_graph import PlanError
from amp_graph.ir import Color
from amp_graph.numerics.smallest import smallest

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_calibrate_denies_the_planted_overflow_and_what_it_needs() -> None:
    model = Planted("overflow")
    found = amp_graph.calibrate(model, [inputs()], 0.1, policy="float16")
    assert found.before == float("inf")
    assert found.after <= 0.1
    assert [name for _, name, _ in found.denied] == ["mul"]
    assert "overflow" in found.denied[0][2]
    assert "1 node denied" in str(found)
    assert re.search(r"graph 0  mul at planted.py:\d+: .*overflow", str(found))


def test_a_calibrated_plan_is_followed_and_finite(tmp_path: Path) -> None:
    model, x = Planted("overflow"), inputs()
    assert amp_graph.find_nonfinite(model, x, policy="float16") is not None
    amp_graph.calibrate(model, [x], 0.1, policy="float16").save(tmp_path / "plan.json")
    expected = model(x)
    amp_graph.convert(model, plan=tmp_path / "plan.json")
    out = model(x)
    assert torch.isfinite(out).all()
    assert float((out - expected).norm() / expected.norm()) < 0.1
    plan = amp_graph.plans(model)[0]
    assert plan.paints["mul"].rule == "calibrated" and "overflow" in plan.paints["mul"].because
    assert plan.paints["linear_3"].color is Color.ALLOW and "linear_3" in plan.low


def test_plans_are_looked_at_as_a_converted_model_is() -> None:
    model, x = Planted("overflow"), inputs()
    plans = amp_graph.calibrate(model, [x], 0.1, policy="float16").plans
    assert amp_graph.compare(model, x, plan=plans).outputs <= 0.1
    assert amp_graph.find_nonfinite(model, x, plan=plans) is None
    again = amp_graph.calibrate(model, [x], 0.1, plan=plans)
    assert not again.denied and again.plans[0].paints["mul"].rule == "calibrated"
    amp_graph.convert(model, policy="float16")
    assert amp_graph.compare(model, x).outputs == float("inf")
    assert amp_graph.compare(model, x, plan=plans).outputs <= 0.1
    for look in (amp_graph.compare, amp_graph.find_nonfinite):
        with pytest.raises(PlanError, match="none of its plans is for this graph"):
            look(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), x, plan=plans)
        with pytest.raises(PlanError, match="the policy asks for bfloat16"):
            look(model, x, policy="bfloat16", plan=plans)


@pytest.mark.parametrize(("fault", "bound"), [("underflow", 1.5e-3), ("nan", 0.1)])
def test_no_denied_node_is_in_vain(fault: str, bound: float) -> None:
    """With any one of them back in low precision the bound is not met."""
    model, x = Planted(fault), inputs()
    found = amp_graph.calibrate(model, [x, x * 2], bound, policy="float16")
    assert found.denied and found.after <= bound
    names = [name for _, name, _ in found.denied]
    for kept in itertools.combinations(names, len(names) - 1):
        overrides = [amp_graph.Override("deny", name=name) for name in kept]
        policy = amp_graph.Policy(dtype="float16", overrides=tuple(overrides))
        torch._dynamo.reset()
        comparisons = [amp_graph.compare(model, x * k, policy=policy) for k in (1, 2)]
        assert max(max(c.outputs, c.gradients) for c in comparisons) > bound


def test_nothing_to_do() -> None:
    found = amp_graph.calibrate(Net().eval(), [torch.randn(4, 8)], 0.5, policy="bfloat16")
    assert found.denied == () and found.trials == 1


@given(st.sets(st.integers(0, 30), max_size=5), st.integers(0, 30))
def test_the_set_found_is_the_one_needed(needed: set[int], seed: int) -> None:
    nodes = tuple((0, "", str((i * 7 + seed) % 31)) for i in range(31))
    wanted = {(0, "", str(i)) for i in needed}
    assert set(smallest(nodes, lambda chosen: wanted <= set(chosen))) == wanted


def test_errors_are_told_from_the_bound() -> None:
    found = amp_graph.Calibration((), (), bound=0.001, before=0.001004, after=0.00084, trials=2)
    assert str(found).startswith("error 0.001004 before, 0.00084 after; bound 0.001; 0 nodes")


class Stateful(nn.Module):
    """What its calls do depends on those before: a count, a tensor kept, and one written into."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.calls, self.last, self.mean = 0, None, torch.zeros(8)
        self.ones = torch.ones(1).expand(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.layer(x)
        x = x if self.last is None else x + self.last
        self.last = x.detach()
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        self.seen = getattr(self, "seen", 1) * 2
        return x * self.calls * self.seen * self.ones - self.mean


def test_the_state_of_a_model_is_put_back() -> None:
    model, x = Stateful(), torch.randn(4, 8)
    assert amp_graph.compare(model, x, policy="bfloat16").outputs < 0.01
    found = amp_graph.calibrate(model, [x], 1e-4, policy="bfloat16")
    assert [name for _, name, _ in found.denied] == ["linear"] and found.after == 0
    assert (model.calls, model.last, model.mean.any()) == (0, None, False)
    assert not hasattr(model, "seen")


class Checkpointed(nn.Module):
    """Two bodies with nodes of the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return x


def test_nodes_of_the_same_name_are_told_apart_by_their_modules() -> None:
    texts = [
        str(amp_graph.compare(Checkpointed(), inputs(), policy="bfloat16")),
        str(amp_graph.calibrate(Checkpointed(), [inputs()], 0, policy="bfloat16")),
    ]
    assert all("layers.0" in text and "layers.1" in text for text in texts)
