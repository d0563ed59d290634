"""What differs between two plans, and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from nets import Net

import amp_graph
from amp_graph import Override, PlanError, Policy

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def plans(*batch_sizes: int, overrides: tuple[Override, ...] = ()) -> tuple[amp_graph.Plan, ...]:
    torch._dynamo.reset()
    policy = Policy(dtype="bfloat16", overrides=overrides)
    model = amp_graph.convert(Net().eval(), policy=policy)
    for size in batch_sizes or (4,):
        model(torch.randn(size, 8))
    return amp_graph.plans(model)


def test_equal_plans(tmp_path: Path) -> None:
    amp_graph.save_plan(plans(), tmp_path / "a.json")
    assert not amp_graph.diff(plans(), tmp_path / "a.json")
    assert str(amp_graph.diff(plans(), plans())) == "The plans decide alike.\n"


def test_a_change_and_its_reason() -> None:
    difference = amp_graph.diff(plans(), plans(overrides=(Override("deny", module="second"),)))
    assert difference
    assert_expected_inline(
        str(difference),
        """\
graph 0: 2 nodes decided otherwise, casts 6 moving 1.5 KiB -> 4 moving 1.4 KiB
  node      before                              after                                    line
  linear_1  allow, bfloat16 (listed: matmul)    deny, float32 (override: module=second)  nets.py:26
  mul       infer, bfloat16 (free: arithmetic)  deny, float32 (downstream of: linear_1)  nets.py:26
""",
    )


def test_a_plan_that_was_edited_by_hand(tmp_path: Path) -> None:
    """Its colours count, and not the precisions and casts that it had before."""
    amp_graph.save_plan(plans(), tmp_path / "a.json")
    table = json.loads((tmp_path / "a.json").read_text())
    paints = table["plans"][0]["paints"]
    paints["mul"]["color"], paints["relu"]["color"] = "deny", "allow"
    paints["linear_1"]["color"] = "infer"
    (tmp_path / "b.json").write_text(json.dumps(table))
    assert_expected_inline(
        str(amp_graph.diff(tmp_path / "a.json", tmp_path / "b.json")),
        """\
graph 0: 3 nodes decided otherwise, casts 6 moving 1.5 KiB -> to follow when a model runs with the edits
  node      before                              after                                        line
  relu      clear, bfloat16 (free: sign)        allow, bfloat16 (edited by hand)             nets.py:26
  linear_1  allow, bfloat16 (listed: matmul)    infer, bfloat16 or float32 (edited by hand)  nets.py:26
  mul       infer, bfloat16 (free: arithmetic)  deny, float32 (edited by hand)               nets.py:26
""",  # noqa: E501
    )
    torch._dynamo.reset()
    model = amp_graph.convert(Net().eval(), plan=tmp_path / "b.json")
    model(torch.randn(4, 8))
    (followed,) = amp_graph.diff(tmp_path / "b.json", amp_graph.plans(model)).graphs
    shown = {c.node: (c.before.precision, c.after.precision) for c in followed.changes}
    assert shown["mul"] == ("float32", "float32") and shown["relu"] == ("bfloat16", "bfloat16")
    assert followed.edited == (True, False)


def test_a_graph_that_runs_as_captured_was_not_edited() -> None:
    (plan,) = plans()
    found = str(amp_graph.diff(plan, plan.as_captured("planted")))
    assert "runs as decided -> runs as captured: planted" in found and "by hand" not in found


def test_graphs_are_paired_by_what_they_are() -> None:
    both = plans(4, 6)
    assert len(both) == 2
    assert not amp_graph.diff(both, both[::-1])
    fewer = amp_graph.diff(both, both[1])
    assert fewer and (fewer.only_before, fewer.only_after) == (1, 0)
    assert "1 graph in the first alone" in str(fewer)


def test_a_graph_that_is_there_twice_has_one_partner_each() -> None:
    first, second = plans(), plans(overrides=(Override("deny", module="second"),))
    found = amp_graph.diff([*first, *first], [*second, *first])
    assert [bool(g.changes) for g in found.graphs] == [True, False]


def test_nodes_that_are_gone() -> None:
    class Shorter(Net):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return self.second(torch.relu(self.first(x)))

    torch._dynamo.reset()
    model = amp_graph.convert(Shorter().eval(), policy="bfloat16")
    model(torch.randn(4, 8))
    difference = amp_graph.diff(plans(), amp_graph.plans(model))
    gone = {c.node for c in difference.graphs[0].changes if c.after is None}
    assert {"batch_norm", "mul"} <= gone
    assert "not there" in str(difference)


def test_a_file_that_is_no_plan(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(PlanError, match="not a plan"):
        amp_graph.diff(tmp_path / "a.json", plans())
