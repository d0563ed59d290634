"""Plans as files: the round trip, edits by hand, files that are wrong, and other graphs."""

from __future__ import annotations

import copy
import json
import os
import typing
import warnings
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import zoo
from nets import Net, low_share
from saved_plans import color, edit, save_net_plan
from torch import nn
from two_layers import Packed

import amp_graph
from amp_graph import ConversionWarning, Override, PlanError, Policy
from amp_graph.ir import Cast, Color, NodeFacts, Paint, Plan, TensorFacts
from amp_graph.plans.matching import fingerprint
from amp_graph.plans.plan_file import plan_schema

SCHEMA = Path(__file__).parent.parent / "docs" / "plan.schema.json"
IN_SUITE = """
    linear residual convnet lstm checkpointed custom_function own_autocast data_dependent_branch
    gpt2 bert vit t5
""".split()


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 8)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_net_plan(tmp_path / "plan.json")


def test_every_kind_of_value_comes_back(tmp_path: Path) -> None:
    tensor = TensorFacts(torch.float32, (4, "s0", "s0*2 + 1"), "cuda", 12)
    facts = NodeFacts(
        "a",
        "aten.add.Tensor",
        color=Color.INFER,
        bounded=True,
        reads=("a", "b"),
        tensors=(tensor, TensorFacts(torch.int64, (), "cpu", 1)),
        scalars=(1.0, float("inf"), float("-inf"), 1e-45),
    )
    body = Plan(torch.float16, {"n": NodeFacts("n", "placeholder")}, fallback="why")
    plan = Plan(
        torch.bfloat16,
        {"a": facts, "<script>": NodeFacts("<script>", "x", code='"ünïcode"')},
        {"a": Paint(Color.DENY, "rule", "because", wide=True)},
        frozenset({"a"}),
        (Cast("a", torch.float32, ("b", "c"), 24, saturate=True),),
        {"body": body},
    )
    amp_graph.save_plan(plan, tmp_path / "p.json")
    assert amp_graph.load_plan(tmp_path / "p.json") == (plan,)


@pytest.mark.parametrize("name", IN_SUITE)
def test_round_trip(name: str, tmp_path: Path) -> None:
    """The same decisions after saving, loading and converting another copy by the file."""
    case = next(c for c in zoo.cases() if c.name == name)
    round_trip(case, tmp_path / "plan.json")


def round_trip(case: zoo.Case, path: Path) -> None:
    first = run(case)
    amp_graph.save_plan(amp_graph.plans(first), path)
    assert amp_graph.load_plan(path) == amp_graph.plans(first)
    jsonschema.validate(json.loads(path.read_text()), plan_schema())
    torch._dynamo.reset()
    assert amp_graph.plans(run(case, path)) == amp_graph.plans(first)


def run(case: zoo.Case, plan: Path | None = None) -> nn.Module:
    model = amp_graph.convert(case.make(), policy="bfloat16", plan=plan)
    args, kwargs = case.batch(0, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConversionWarning)
        case.loss(model(*args, **kwargs))
    return model


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="torch 2.14 has dtypes that 2.13 has not")
def test_the_schema_document_is_the_one_of_the_code() -> None:
    text = json.dumps(plan_schema(), indent=2) + "\n"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        SCHEMA.write_text(text)
    assert SCHEMA.read_text() == text, "EXPECTTEST_ACCEPT=1 renews docs/plan.schema.json"
    jsonschema.Draft202012Validator.check_schema(plan_schema())


def test_the_types_of_fields_are_looked_up_once(saved: Path, monkeypatch: Any) -> None:
    """Python evaluates their text each time, which took most of the time of reading a plan."""
    asked: list[Any] = []
    look_up = typing.get_type_hints
    monkeypatch.setattr(typing, "get_type_hints", lambda kind: asked.append(kind) or look_up(kind))
    amp_graph.load_plan(saved)
    assert len(asked) == len(set(asked))


def test_a_node_is_one_line(saved: Path) -> None:
    line = next(t for t in saved.read_text().splitlines() if '"linear": {"color"' in t)
    assert json.loads("{" + line.rstrip(",") + "}")["linear"]["because"] == "matmul"


def test_an_edited_colour_is_honoured_and_its_casts_follow(saved: Path, x: torch.Tensor) -> None:
    edit(saved, color("linear_1", "deny"))
    model = amp_graph.convert(Net().eval(), plan=saved)
    assert low_share(model, x) == 0.5
    plan = amp_graph.plans(model)[0]
    paint = plan.paints["linear_1"]
    assert paint.color is Color.DENY
    assert (paint.rule, paint.because) == ("saved in the plan", "without it allow, listed: matmul")
    assert "linear_1" not in plan.low
    assert not any("second" in cast.value for cast in plan.casts)
    assert any(cast.readers == ("linear_1",) for cast in plan.casts)


def test_a_deep_copy_follows_the_plan_too(saved: Path, x: torch.Tensor) -> None:
    edit(saved, color("linear_1", "deny"))
    model = copy.deepcopy(amp_graph.convert(Net().eval(), plan=saved))
    assert low_share(model, x) == 0.5


def test_a_colour_edited_to_free_goes_where_fewer_bytes_move(saved: Path, x: torch.Tensor) -> None:
    edit(saved, color("linear", "deny"))
    edit(saved, color("linear_1", "clear"))
    model = amp_graph.convert(Net().eval(), plan=saved)
    assert low_share(model, x) == 0
    assert amp_graph.plans(model)[0].cast_bytes == 0


def test_saved_decisions_beat_lists_and_policy(saved: Path, x: torch.Tensor) -> None:
    policy = Policy(
        dtype="bfloat16",
        lists={"deny": ["aten.linear"]},
        overrides=(Override("deny", op="aten.linear"),),
    )
    model = amp_graph.convert(Net().eval(), policy=policy, plan=saved)
    assert low_share(model, x) == 1


def test_an_override_that_was_saved_keeps_its_reason(tmp_path: Path, x: torch.Tensor) -> None:
    policy = Policy(dtype="bfloat16", overrides=(Override("deny", module="second"),))
    model = amp_graph.convert(Net().eval(), policy=policy, example_inputs=(x,))
    amp_graph.save_plan(amp_graph.plans(model), tmp_path / "p.json")
    torch._dynamo.reset()
    again = amp_graph.convert(Net().eval(), plan=tmp_path / "p.json", example_inputs=(x,))
    assert amp_graph.plans(again)[0].paints["linear_1"].because == "module=second"


def test_plans_as_objects(x: torch.Tensor) -> None:
    model = amp_graph.convert(Net().eval(), example_inputs=(x,))
    plans = amp_graph.plans(model)
    for given in (plans, plans[0], list(plans)):
        torch._dynamo.reset()
        again = amp_graph.convert(Net().eval(), plan=given, example_inputs=(x,))
        assert amp_graph.plans(again) == plans


def test_other_shapes_and_modes_follow_the_same_decisions(saved: Path, x: torch.Tensor) -> None:
    edit(saved, color("linear_1", "deny"))
    model = amp_graph.convert(Net(), plan=saved)
    for inputs in (x, torch.randn(6, 8), torch.randn(9, 8)):  # the third is captured symbolically
        model(inputs)
    assert len(amp_graph.plans(model)) >= 2
    for plan in amp_graph.plans(model):
        assert plan.paints["linear_1"].color is Color.DENY
        assert fingerprint(plan) != fingerprint(amp_graph.load_plan(saved)[0])


class Deeper(Net):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        hidden = torch.tanh(hidden)
        return self.second(hidden) * scale


def test_another_graph_is_an_error_that_names_the_first_difference(
    saved: Path, x: torch.Tensor
) -> None:
    model = Deeper()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    amp_graph.convert(model, plan=saved)
    for _ in range(2):  # the second call says so too
        with pytest.raises(
            PlanError, match=r"node 'tanh' at test_plan_files.py:\d+ .* is aten.tanh"
        ):
            model(x)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert amp_graph.plans(amp_graph.restore(model) and amp_graph.convert(model)) == ()


def test_with_example_inputs_the_model_stays_plain(saved: Path, x: torch.Tensor) -> None:
    model = Deeper()
    with pytest.raises(PlanError, match="tanh"):
        amp_graph.convert(model, plan=saved, example_inputs=(x,))
    assert not amp_graph.is_converted(model)


def test_a_colour_that_cannot_be(saved: Path, x: torch.Tensor) -> None:
    edit(saved, color("output", "allow"))
    with pytest.raises(PlanError, match="'output' cannot be allow, it is keep"):
        amp_graph.convert(Net().eval(), plan=saved, example_inputs=(x,))


def test_another_precision_than_the_policys(saved: Path) -> None:
    with pytest.raises(PlanError, match="is in bfloat16, and the policy asks for"):
        amp_graph.convert(Net(), policy="float16", plan=saved)


def test_code_without_a_graph_is_of_no_precision(tmp_path: Path) -> None:
    """A layer that is not captured runs in bfloat16, where gradients need no scale."""
    x, file = torch.randn(4, 8), tmp_path / "plan.json"
    model = amp_graph.convert(Packed(), policy="float16")
    model(x)
    assert {p.dtype for p in amp_graph.plans(model)} == {torch.float16, torch.bfloat16}
    amp_graph.save_plan(amp_graph.plans(model), file)
    for policy in ("float16", None):
        follows = amp_graph.convert(Packed(), policy=policy, plan=file)
        follows(x)
        assert {p.dtype for p in amp_graph.plans(follows) if p.facts} == {torch.float16}


def test_no_plan_at_all(tmp_path: Path) -> None:
    model = amp_graph.convert(Net())
    for use in (
        lambda: amp_graph.save_plan(amp_graph.plans(model), tmp_path / "plan.json"),
        lambda: amp_graph.convert(Net(), plan=()),
    ):
        with pytest.raises(PlanError, match="a model has plans once it was called"):
            use()
    with pytest.raises(PlanError, match="several Plans, not int"):
        amp_graph.convert(Net(), plan=3)


def test_calibration_keeps_what_the_plan_in_use_denies(saved: Path) -> None:
    edit(saved, lambda table: table["plans"][0]["paints"]["linear"].update(color="deny"))
    model, x = amp_graph.convert(Net().eval(), plan=saved), torch.randn(4, 8)
    model(x)
    bound = amp_graph.compare(model, x).outputs / 2
    found = amp_graph.calibrate(model, [x], bound)
    assert found.denied and "linear" not in [name for _, name, _ in found.denied]
    assert found.plans[0].paints["linear"] == amp_graph.plans(model)[0].paints["linear"]
    assert found.plans[0].paints["linear"].color is Color.DENY
