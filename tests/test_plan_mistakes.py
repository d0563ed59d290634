"""Plan files with mistakes in them: one clear error, and the model as it was."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nets import Net
from saved_plans import edit, save_net_plan
from torch import nn

import amp_graph
from amp_graph import AmpGraphError, Plan, PlanError, Policy, PolicyError
from amp_graph.calls.capture_cache import clear

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_net_plan(tmp_path / "plan.json")


def drop(*path: Any) -> Any:
    def change(table: Any) -> None:
        for key in path[:-1]:
            table = table[key]
        del table[path[-1]]

    return change


def put(value: Any, *path: Any) -> Any:
    def change(table: Any) -> None:
        for key in path[:-1]:
            table = table[key]
        table[path[-1]] = value

    return change


PLAN = ("plans", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("other", "format"), 'does not say "format"'),
        (put(2, "schema"), "this version reads schema 1"),
        (drop("schema"), "this version reads schema 1"),
        (put(2.13, "torch"), "'torch' must be the version"),
        (put([], "plans"), "at least one plan"),
        (put({}, "plans"), "at least one plan"),
        (put([3], "plans"), r"plans\[0\]: must be an object"),
        (put("float9", *PLAN, "dtype"), r"plans\[0\].dtype: 'float9' is not known.* Did you mean"),
        (put(["float32"], *PLAN, "dtype"), "not known"),
        (
            put("float32", *PLAN, "dtype"),
            r"plan.json: plans\[0\].dtype: must be float16 or bfloat16, not 'float32'",
        ),
        (put("denny", *PLAN, "paints", "linear", "color"), "paints.linear.color: 'denny' is none"),
        (put(1, *PLAN, "paints", "linear", "colour"), "unknown key 'colour'. Did you mean 'color'"),
        (drop(*PLAN, "paints", "linear", "rule"), "paints.linear: 'rule' is missing"),
        (put({"color": "deny", "rule": "x"}, *PLAN, "paints", "ghost"), "has no node 'ghost'"),
        (put("x", *PLAN, "facts", "linear", "op"), "are not for editing"),
        (drop(*PLAN, "facts", "linear"), "are not for editing"),
        (put("0" * 64, *PLAN, "fingerprint"), "are not for editing"),
        (drop(*PLAN, "fingerprint"), "are not for editing"),
        (put([[]], *PLAN, "casts"), r"casts\[0\]: must be an object, not \[\]"),
        (put(True, *PLAN, "casts", 0, "bytes"), "casts.0..bytes: must be int, not True"),
        (put(7, *PLAN, "low"), "low: must be an array"),
        (put([10**400], *PLAN, "facts", "linear", "scalars"), r"scalars\[0\]: 10*\S* is none of"),
    ],
)
def test_a_file_with_a_mistake(saved: Path, change: Any, message: str) -> None:
    edit(saved, change)
    refused(saved, message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cut off"),
        (b"\x80\x04\x95K\x00.", "not a plan"),
        (b"[" * 100_000, "not a plan"),
        (b"[]", "does not say"),
        (b"null", "does not say"),
        (b"{}", "does not say"),
    ],
    ids=["empty", "pickle", "deep", "array", "null", "object"],
)
def test_a_foreign_file(saved: Path, content: bytes, message: str) -> None:
    saved.write_bytes(content)
    refused(saved, message)


def test_a_file_cut_off_anywhere(saved: Path) -> None:
    content = saved.read_bytes()
    for length in range(1, len(content) - 2, 997):
        saved.write_bytes(content[:length])
        refused(saved, "cut off")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_change_is_read_or_refused(saved: Path, data: st.DataObject) -> None:
    """Whatever is put into whichever place, the answer is plans or a PlanError."""
    table = json.loads(saved.read_text())
    place: Any = table
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        inner = place[key]
        if not isinstance(inner, (dict, list)) or not inner or data.draw(st.integers(0, 3)) == 0:
            break
        place = inner
    place[key] = data.draw(JSON)
    changed = saved.with_name("changed.json")
    changed.write_text(json.dumps(table))
    with contextlib.suppress(PlanError):
        assert all(isinstance(p, Plan) for p in amp_graph.load_plan(changed))


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    refused(tmp_path / "none.json", "cannot be read: No such file")


def test_what_is_no_plan() -> None:
    with pytest.raises(PlanError, match="a plan is a file, a Plan or several Plans"):
        amp_graph.convert(Net(), plan=Net())  # type: ignore[arg-type]


def refused(path: Path, message: str) -> None:
    model = Net()
    attributes = set(vars(model))
    with pytest.raises(PlanError, match=message):
        amp_graph.convert(model, plan=path)
    assert set(vars(model)) == attributes


def test_nothing_in_a_file_is_run() -> None:
    folder = Path(amp_graph.__file__).parent / "plans"
    for name in ("plan_file.py", "plain_json.py", "pins.py"):
        text = (folder / name).read_text()
        assert not re.search(r"pickle|torch\.load|import_module|\b(eval|exec)\(", text)


def test_plans_of_one_graph_have_to_agree(tmp_path: Path) -> None:
    model, x = amp_graph.convert(Net().eval(), policy="bfloat16"), torch.randn(4, 8)
    model(x)
    with torch.no_grad():
        model(x)
    path = tmp_path / "plan.json"
    amp_graph.save_plan(amp_graph.plans(model), path)
    amp_graph.convert(Net().eval(), plan=path)(x)
    edit(path, put("deny", "plans", 1, "paints", "relu", "color"))
    with pytest.raises(
        PlanError, match="plans 0 and 1 are for the same graph, and 'relu' is clear"
    ):
        amp_graph.convert(Net().eval(), plan=path)(x)
    edit(path, put("deny", "plans", 0, "paints", "relu", "color"))
    followed = amp_graph.convert(Net().eval(), plan=path)
    followed(x)
    assert amp_graph.plans(followed)[0].paints["relu"].color is amp_graph.Color.DENY


def test_so_have_plans_of_one_computation_that_were_edited(tmp_path: Path) -> None:
    """Else what is saved for one size and for the others would go by which of them comes first."""
    model, path = amp_graph.convert(Net(), policy="bfloat16"), tmp_path / "plan.json"
    for n in (4, 6):
        model(torch.randn(n, 8))
    amp_graph.save_plan(amp_graph.plans(model), path)
    edit(path, put("deny", "plans", 1, "paints", "relu", "color"))
    of_both = amp_graph.convert(Net(), plan=path)
    of_both(torch.randn(4, 8))
    of_both(torch.randn(9, 8))
    assert [plan.paints["relu"].color.value for plan in amp_graph.plans(of_both)] == [
        "clear",
        "deny",
    ]
    torch._dynamo.reset()
    clear()
    model = amp_graph.convert(Net(), plan=path)
    with pytest.raises(PlanError, match="1 are for the same computation, and 'relu' is clear"):
        model(torch.randn(9, 8))
    edit(path, put("deny", "plans", 0, "paints", "relu", "color"))
    amp_graph.convert(Net(), plan=path)(torch.randn(9, 8))


def test_a_plan_of_another_graph_tells_of_another_torch(saved: Path) -> None:
    def said() -> str:
        with pytest.raises(PlanError, match="First difference") as error:
            amp_graph.convert(nn.Sequential(nn.Linear(8, 8)), plan=saved)(torch.randn(4, 8))
        return str(error.value)

    assert "saved under" not in said()
    edit(saved, put("1.0.0", "torch"))
    assert f"It was saved under torch 1.0.0; this is {torch.__version__}. Save" in said()
    edit(saved, drop("torch"))
    assert "saved under" not in said()


def test_an_empty_path_is_not_the_current_folder() -> None:
    for call, kind in (
        (lambda: amp_graph.dump(Net(), ""), AmpGraphError),
        (lambda: amp_graph.load_plan(""), PlanError),
        (lambda: amp_graph.save_plan(Plan(torch.bfloat16), ""), PlanError),
        (lambda: amp_graph.convert(Net(), plan=""), PlanError),
        (lambda: Policy(lists=""), PolicyError),
    ):
        with pytest.raises(kind, match=r"a path is empty; the current folder is '.'"):
            call()


def test_what_is_no_path() -> None:
    said = "a path is a str or a pathlib.Path, not int 5"
    for write in (lambda: amp_graph.load_plan(5), lambda: amp_graph.dump(Net(), 5)):
        with pytest.raises(AmpGraphError, match=said):
            write()


def test_a_node_that_is_given_twice(saved: Path) -> None:
    text = saved.read_text()
    (line,) = (line for line in text.splitlines() if line.strip().startswith('"linear": {"color"'))
    saved.write_text(text.replace(line, f"{line.replace('allow', 'deny')}\n{line}"))
    with pytest.raises(PlanError, match=r"plan\.json: 'linear' is there twice in one object"):
        amp_graph.load_plan(saved)
