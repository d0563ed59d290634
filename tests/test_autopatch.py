"""AMP_GRAPH_ENABLE and the other variables, in this process; test_startup has whole processes."""

from __future__ import annotations

import copy
import os
from unittest import mock

import pytest
import torch
from nets import X, net
from torch import nn
from torch._dynamo.utils import counters

import amp_graph
from amp_graph.autopatch.install import SLOT, install
from amp_graph.autopatch.settings import COLORS, VARIABLES, Settings
from amp_graph.autopatch.summary import summary_of
from amp_graph.errors import AmpGraphError, PolicyError
from amp_graph.levels import Level
from amp_graph.policy import Policy


def low_operators(installation, model: int = 0) -> set[str]:
    (plan,) = installation.models.seen[model].record.plans
    return {plan.facts[name].op.split(".")[1] for name in plan.low}


def test_two_installs_are_one_and_undo_restores_names_and_models(start):
    before, model = nn.Module.__dict__[SLOT], net()
    expected, attributes = model(X), dict(model.__dict__)
    one = start()
    assert install() is one and start(VERBOSE="1") is one
    assert nn.Module.__dict__[SLOT] is not before
    model(X)
    assert amp_graph.is_converted(model)
    one.undo()
    assert nn.Module.__dict__[SLOT] is before
    assert model.__dict__ == attributes
    assert torch.equal(model(X), expected)
    one.undo()  # once more changes nothing
    two = start()
    assert two is not one
    one.undo()
    assert nn.Module.__dict__[SLOT] is not before and install() is two


def test_undo_takes_back_what_is_its_own_and_no_more():
    policy = Policy("bfloat16")
    installation, model, own = install(Settings(policy)), net(), net()
    expected = model(X), own(X)
    copies = [copy.deepcopy(model), copy.deepcopy(model)]
    copies[0](X)
    amp_graph.restore(own)
    amp_graph.convert(own, policy=policy)
    installation.undo()
    assert not any(map(amp_graph.is_converted, (model, *copies)))
    assert amp_graph.is_converted(own) and torch.equal(own(X), expected[1])
    for each in copies:
        assert torch.equal(each(X), model(X))


def test_settings_take_what_convert_takes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = Settings("bfloat16", "folder")
    assert settings.policy == Policy("bfloat16") and settings.dump == tmp_path / "folder"
    assert Settings.read({"AMP_GRAPH_DUMP": "folder"}).dump == tmp_path / "folder"


@pytest.mark.parametrize(
    "wrong", [{"policy": 3}, {"policy": Policy(lists="none.toml")}, {"dump": 3}, {"verbose": "no"}]
)
def test_wrong_settings(wrong):
    with pytest.raises(amp_graph.AmpGraphError):
        Settings(**wrong)


def test_models_of_a_script_are_compiled_if_asked(start, traced):
    installation, model = start(COMPILER="Inductor"), net()
    counters.clear()
    model(X).sum().backward()
    assert counters["aot_autograd"]["total"] == 1
    assert installation.models.seen[0].record.plans[0].uncompiled is None
    assert Settings.read({"AMP_GRAPH_COMPILER": "inductor"}).policy.compiler == "inductor"
    assert Settings.read({"AMP_GRAPH_LEVEL": "max"}).policy.level is Level.MAX
    kept = Settings.read({"AMP_GRAPH_REFRESH_WEIGHTS": "on_change"}).policy
    assert kept.refresh_weights == "on_change"
    assert Settings.read({}).policy.compiler == "eager"
    assert Settings.read({"AMP_GRAPH_EMULATION": "float32"}).policy.emulation == "float32"


def test_the_table_of_variables_is_what_is_read():
    assert len(VARIABLES) == 1 + 2 + 2 * len(COLORS) + 8
    assert Settings.read({"PATH": "x", **dict.fromkeys(VARIABLES, "")}) == Settings()


SCALES = "choose dynamic, none or a finite number above 0"
WRONG = {
    "DTYPE": ("float8", "AMP_GRAPH_DTYPE=float8: choose one of float16, bfloat16"),
    "LEVEL": ("fast", "AMP_GRAPH_LEVEL=fast: choose one of safe, balanced, max"),
    "REFRESH_WEIGHTS": (
        "never",
        "AMP_GRAPH_REFRESH_WEIGHTS=never: choose one of always, on_change",
    ),
    "EMULATION": ("gpu", "AMP_GRAPH_EMULATION=gpu: choose one of native, float32"),
    "COMPILER": ("nvcc", "AMP_GRAPH_COMPILER=nvcc: choose one of eager, inductor"),
    "VERBOSE": ("2", "AMP_GRAPH_VERBOSE=2: choose one of 1, true, yes, on, 0, false, no, off"),
    "LOSS_SCALE": ("big", f"AMP_GRAPH_LOSS_SCALE=big: {SCALES}"),
    "LOSS_SCALE ": ("-2", f"AMP_GRAPH_LOSS_SCALE=-2: {SCALES}"),
    "LOSS_SCALE  ": ("inf", f"AMP_GRAPH_LOSS_SCALE=inf: {SCALES}"),
    "LISTS": ("no.toml", "no.toml: cannot be read"),
    "DENYLIST_ADD": ("aten.no_such", "group 'AMP_GRAPH_DENYLIST_ADD'"),
    "ALLOWLIST_REMOVE": ("aten.gelu", "'aten.gelu' is on the infer list"),
    "DUMP": (__file__, f"AMP_GRAPH_DUMP={__file__}: {__file__!r} is a file; give a folder"),
    "DUMP ": (
        f"{__file__}/x",
        f"AMP_GRAPH_DUMP={__file__}/x: {__file__!r} is a file; give a folder",
    ),
    "DTYP": ("float16", "AMP_GRAPH_DTYP is not known; there are AMP_GRAPH_ENABLE, "),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_refused_with_what_is_legal(name):
    value, message = WRONG[name]
    with pytest.raises(AmpGraphError) as error:
        Settings.read({f"AMP_GRAPH_{name.strip()}": value})
    assert message in str(error.value)


@pytest.mark.parametrize("given", [3, Policy("bfloat16")], ids=["int", "Policy"])
def test_what_are_no_settings(given):
    before, kind = nn.Module.__dict__[SLOT], type(given).__name__
    with pytest.raises(PolicyError, match=f"takes Settings, or nothing, not {kind} "):
        install(given)
    assert nn.Module.__dict__[SLOT] is before


def test_dtype_and_loss_scale(start):
    for variables, dtype, scale in (
        ({}, "bfloat16", None),
        ({"DTYPE": "float16"}, "float16", 2.0**16),
        ({"DTYPE": "FLOAT16", "LOSS_SCALE": "Dynamic"}, "float16", 2.0**16),
        ({"DTYPE": "float16", "LOSS_SCALE": "none"}, "float16", None),
        ({"DTYPE": "bfloat16", "LOSS_SCALE": "128"}, "bfloat16", 128.0),
    ):
        installation, model = start(**variables), net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        model(X).sum().backward()
        optimizer.step()
        described = summary_of(installation.models.seen[0]).as_json()
        installation.undo()
        assert described["dtype"] == dtype
        assert described.get("loss_scale") == scale
        assert described.get("steps_skipped") == (None if scale is None else 0)


@pytest.mark.filterwarnings("ignore:nothing of Sequential")
def test_lists_from_files_and_from_variables(start, tmp_path):
    deny, infer = tmp_path / "deny.toml", tmp_path / "infer.toml"
    deny.write_text('schema = 1\n[deny.mine]\nwhy = "a test."\nops = ["aten.gelu"]\n')
    infer.write_text('schema = 1\n[infer.mine]\nwhy = "a test."\nops = ["aten.gelu"]\n')
    for variables, low in (
        ({}, {"linear", "gelu"}),
        ({"LISTS": str(deny)}, {"linear"}),
        ({"LISTS": f"{deny}{os.pathsep}"}, {"linear"}),
        ({"DENYLIST_ADD": "aten.gelu , aten.tanh"}, {"linear"}),
        ({"INFERLIST_REMOVE": "gelu"}, {"linear"}),
        ({"INFERLIST_REMOVE": "gelu", "ALLOWLIST_ADD": "gelu"}, {"linear", "gelu"}),
        ({"LISTS": str(infer), "ALLOWLIST_REMOVE": "linear"}, set()),
        ({"CLEARLIST_ADD": "gelu", "DENYLIST_REMOVE": "softmax"}, {"linear", "gelu"}),
    ):
        installation = start(**variables)
        net()(X)
        assert low_operators(installation) == low, variables
        installation.undo()


def test_skipped_modules_stay_float32(start):
    for skip, low in (("0", 1), ("0, 2", 0), ("?", 0), ("layers.*", 2)):
        installation = start(SKIP=skip)
        with mock.patch("warnings.warn"):
            net()(X)
        (plan,) = installation.models.seen[0].record.plans
        linear = [n for n in plan.low if "linear" in plan.facts[n].op]
        assert len(linear) == low, skip
        installation.undo()


def test_verbose_says_what_is_converted_when_it_is(start, capsys):
    for verbose, said in (("yes", "amp_graph: Sequential runs in mixed precision\n"), ("0", "")):
        installation = start(VERBOSE=verbose)
        net()(X)
        assert capsys.readouterr().err == said
        installation.undo()


def test_a_model_that_is_called_while_another_thread_compiles_is_converted(start):
    installation, model = start(), net()
    with mock.patch.object(torch.compiler, "_is_compiling_flag", True):  # the process's
        model(X)
    assert amp_graph.is_converted(model)
    assert installation.models.seen[0].record.runs
