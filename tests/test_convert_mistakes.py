"""What cannot be converted, and policies that make no sense: one clear error each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nets import Net
from torch import nn

import amp_graph
from amp_graph import (
    AmpGraphError,
    ConversionWarning,
    LossScale,
    Override,
    PlanError,
    Policy,
    PolicyError,
)
from amp_graph.inspection import render
from amp_graph.ir import Plan

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def compiled_forward(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


class Compiled(nn.Linear):
    forward = torch.compile(nn.Linear.forward, backend="eager")


class Asynchronous(nn.Linear):
    async def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_what_is_asked_of_a_model_around_a_converted_one_says_which_it_is():
    around = nn.ModuleDict({"net": nn.Sequential(nn.Linear(4, 4))})
    with pytest.raises(AmpGraphError, match="ModuleDict is not converted; call"):
        amp_graph.plans(around)
    amp_graph.convert(around["net"])
    with pytest.raises(AmpGraphError, match="ModuleDict is not converted; its part 'net' is, so"):
        amp_graph.plans(around)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (42, "takes a torch.nn.Module, not int"),
        (nn.ReLU(), "no floating-point parameters"),
        (nn.Linear(2, 2).half(), "float16 only"),
        (nn.Linear(2, 2).double(), "float64 only"),
        (torch.jit.script(nn.Linear(2, 2)), "scripted"),
        (Asynchronous(2, 2), "asynchronous"),
        (compiled_in_place(nn.Linear(2, 2)), "Linear is compiled by torch.compile"),
        (torch.compile(nn.Linear(2, 2), backend="eager"), "is compiled by torch.compile"),
        (compiled_forward(nn.Linear(2, 2)), "Linear is compiled by torch.compile"),
    ],
    ids=(
        "not_a_module no_parameters half double scripted asynchronous in_place compiled "
        "compiled_forward"
    ).split(),
)
def test_what_cannot_be_converted(model: Any, message: str) -> None:
    with pytest.raises(AmpGraphError, match=message):
        amp_graph.convert(model)


def test_what_its_class_compiles_is_converted_with_a_warning() -> None:
    """There is no such model as it was before."""
    model = amp_graph.convert(Compiled(2, 2), policy="bfloat16")
    with pytest.warns(amp_graph.ConversionWarning, match="torch.compile around it does nothing"):
        model(torch.randn(2, 2))
    assert amp_graph.plans(model)[0].low


@pytest.mark.parametrize(
    "policy",
    [
        lambda: amp_graph.convert(nn.Linear(2, 2), policy="float8"),
        lambda: amp_graph.convert(nn.Linear(2, 2), policy=torch.float64),
        lambda: amp_graph.convert(nn.Linear(2, 2), policy=7),  # type: ignore[arg-type]
        lambda: Policy(overrides=("deny",)),  # type: ignore[arg-type]
        lambda: Policy(overrides=None),  # type: ignore[arg-type]
        lambda: Policy(keep_float32=(3,)),  # type: ignore[arg-type]
        lambda: Policy(keep_float32=None),  # type: ignore[arg-type]
        lambda: Policy(lists=3),  # type: ignore[arg-type]
        lambda: Policy(removed="deny"),  # type: ignore[arg-type]
        lambda: Policy(compiler="inductor", compiler_options={"max_autotunee": True}),
        lambda: Override("deny", module=3),  # type: ignore[arg-type]
        lambda: Override("deny", where="x"),  # type: ignore[arg-type]
        lambda: Override("purple", op="aten.add"),
        lambda: Override("deny"),
        lambda: Override("deny", op="aten.gelu.defualt"),
        lambda: Override("deny", op="liner"),
        lambda: Override("deny", op="torch.nn.functional.gelu"),
        lambda: Override("deny", op="F.gelu"),
        lambda: Policy(output_dtype="half"),
        lambda: Policy(output_dtype=torch.int64),
    ],
)
def test_a_policy_that_makes_no_sense(policy: Any) -> None:
    with pytest.raises(PolicyError):
        policy()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (lambda: Policy("bf16"), "'bf16': .* Did you mean 'bfloat16'"),
        (lambda: Policy("half"), "'half': .* Did you mean 'float16'"),
        (lambda: Policy(torch.float32), "one that is not converted"),
        (lambda: Policy(keep_float32={"head"}), "keep_float32 must be a list or tuple of globs"),
        (lambda: Policy(keep_float32=("head", "")), "keep_float32 holds an empty glob"),
        (lambda: Policy(keep_float32=(nn.LayerNorm,)), "must hold globs of module paths"),
        (lambda: Policy(removed=("deny", "aten.gelu")), "must hold pairs"),
        (lambda: Policy(removed=(("deny", "aten.gelu", 3),)), "must hold pairs"),
        (lambda: Policy(removed=(("allow", 2),)), r"two strings each, not \('allow', 2\)"),
        (lambda: Policy(removed=((["allow"], "aten.mm"),)), "two strings each"),
        (lambda: Policy(removed=(("alow", "aten.mm"),)), "none of allow.* Did you mean 'allow'"),
        (lambda: Policy(removed=(("deny", "aten.gellu"),)), "Did you mean 'aten.gelu'"),
        (lambda: Policy(removed=(("deny", "liner"),)), "has no operator of this name"),
        (lambda: Override("deny", module=0), r"Override\(module=...\) takes a string, not 0"),
        (lambda: Override("deny", op="nn.Linear"), "Did you mean 'aten.linear'"),
        (lambda: LossScale(growth_factor=0.5), "growth_factor 0.5 is below 1"),
        (lambda: LossScale(backoff_factor=2.0), "backoff_factor 2 is above 1"),
        (lambda: LossScale(ceiling=1e60), r"ceiling 1e\+60 must lie between"),
    ],
)
def test_what_is_wrong_in_a_policy_is_told_of(policy: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        policy()


def test_a_policy_given_in_place_of_an_optimizer() -> None:
    with pytest.raises(AmpGraphError, match=r"convert\(model, policy='bfloat16'\)"):
        amp_graph.convert(Net(), "bfloat16")  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: amp_graph.is_converted("net"), "a torch.nn.Module, not str 'net'"),
        (lambda: amp_graph.explain(None), "a torch.nn.Module, not NoneType"),
        (lambda: amp_graph.has_finite_gradients("net"), "a torch.nn.Module, not str"),
        (lambda: amp_graph.step_counts(Net()), "a torch.optim.Optimizer, not Net"),
        (lambda: render(()), r"takes one Plan, .*not tuple \(\)"),
        (lambda: amp_graph.convert(Net(), example_inputs=3), "a batch is .*not int 3"),
        (
            lambda: amp_graph.save_plan(Plan(torch.bfloat16), "none/p.json"),
            "none/p.json: cannot be",
        ),
    ],
)
def test_what_is_no_model_or_optimizer_or_plan(call: Any, message: str) -> None:
    with pytest.raises(AmpGraphError, match=message):
        call()


def test_an_operator_that_torch_has_not_is_named_with_one_that_is_close() -> None:
    with pytest.raises(PolicyError, match=r"'aten.rleu'.*Did you mean 'aten.relu'"):
        Override("deny", op="aten.rleu")
    for op in ("aten.relu", "aten.softmax.int", "cond", "not_imported.operator"):
        assert Override("deny", op=op).op == op


def test_a_single_override_needs_no_tuple() -> None:
    override = Override("deny", module="second")
    assert Policy(overrides=override).overrides == (override,)  # type: ignore[arg-type]


def test_a_glob_that_matches_no_module_warns() -> None:
    policy = Policy(
        dtype="bfloat16",
        keep_float32=("secnod", "first"),
        overrides=(Override("deny", module="layers.*"), Override("deny", name="linear")),
    )
    with pytest.warns(ConversionWarning) as warned:
        model = amp_graph.convert(Net(), policy=policy)
    said = [str(w.message) for w in warned]
    assert len(said) == 2 and all("matches no path in Net.named_modules()" in s for s in said)
    assert said[0].startswith("keep_float32='secnod'") and said[0].endswith("mean 'second'?")
    assert said[1].startswith("Override(module='layers.*')")
    assert all(w.filename == __file__ for w in warned)
    assert amp_graph.is_converted(model)


def test_restore_and_plans_need_a_converted_model() -> None:
    for function in (amp_graph.restore, amp_graph.plans):
        with pytest.raises(AmpGraphError, match="not converted"):
            function(Net())


def test_a_forward_that_is_a_generator_is_refused() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            while True:
                x = self.layer(x)
                yield x

    with pytest.raises(AmpGraphError, match=r"Tokens.forward is a generator"):
        amp_graph.convert(Tokens())


def test_an_override_that_names_no_node_is_told_of_after_the_first_call(recwarn):
    overrides = [Override("deny", name=name) for name in ("linear", "linea?", "linear_9")]
    model = amp_graph.convert(Net(), policy=Policy("bfloat16", overrides=overrides))
    model(torch.randn(4, 8))
    (warning,) = recwarn.list
    said = "Override(name='linear_9') names no node of the first call of Net. Did you mean 'linear"
    assert str(warning.message).startswith(said)
    model(torch.randn(4, 8))
    assert len(recwarn.list) == 1


class Entered(Net):
    def begin(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


class Uncaptured(Net):
    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_an_override_by_name_is_for_the_nodes_of_the_call(recwarn):
    """Not of other methods, nor of a model in which nothing was captured."""
    policy = Policy("bfloat16", overrides=[Override("deny", name="linear_1")])
    model = amp_graph.convert(Entered(), policy=policy, methods=("begin",))
    model.begin(torch.randn(4, 8))
    model = amp_graph.convert(Uncaptured(), policy=policy)
    model(torch.randn(4, 8))
    assert not [w for w in recwarn.list if "names no node" in str(w.message)]


class Methods(nn.Module):
    """No forward, but a method that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_a_container_that_cannot_be_called_is_told_of() -> None:
    parts = nn.ModuleList([nn.Linear(8, 8)])
    with pytest.warns(ConversionWarning, match=r"ModuleList has no forward, so nothing of it"):
        amp_graph.convert(parts, policy="bfloat16")
    assert parts[0](torch.ones(2, 8)).dtype is torch.float32


def test_methods_and_parts_of_what_cannot_be_called_are_converted(recwarn) -> None:
    model = amp_graph.convert(Methods(), policy="bfloat16", methods=("encode",))
    model.encode(torch.ones(2, 8))
    assert amp_graph.plans(model)[0].low
    parts = nn.ModuleList([nn.Linear(8, 8)])
    amp_graph.convert(parts[0], policy="bfloat16")(torch.ones(2, 8))
    assert amp_graph.plans(parts[0])[0].low
    called = nn.Linear(8, 8)
    called.forward = called.forward  # type: ignore[method-assign]
    amp_graph.convert(called, policy="bfloat16")
    assert not recwarn.list


def test_of_a_model_that_is_converted_plan_and_inputs_are_checked_and_told_of(tmp_path) -> None:
    model, x = amp_graph.convert(Net()), torch.randn(4, 8)
    with pytest.raises(PlanError, match="cannot be read"):
        amp_graph.convert(model, plan=tmp_path / "none.json")
    with pytest.raises(AmpGraphError, match="a batch is a tensor"):
        amp_graph.convert(model, example_inputs=object())
    with pytest.warns(ConversionWarning, match="methods. Not used: example_inputs$"):
        amp_graph.convert(model, example_inputs=x)
    assert not amp_graph.plans(model)
    model(x)
    with pytest.warns(ConversionWarning, match="methods. Not used: plan and example_inputs$"):
        amp_graph.convert(model, plan=amp_graph.plans(model), example_inputs=x)
