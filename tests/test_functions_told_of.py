"""Custom autograd functions that run in float32 in code under autocast, and where that is said."""

from __future__ import annotations

import warnings

import pytest
import torch
from product_functions import CastProduct, CastProductOfGpus, Net, Product, X, trained
from torch import nn
from torch.autograd import Function

import amp_graph
from amp_graph import ConversionWarning, Policy
from amp_graph.autopatch.script_models import model_of
from amp_graph.autopatch.summary import summary_of
from amp_graph.convert import record_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def told_of(model: nn.Module) -> list[str]:
    """In what is printed of its plans, by `explain` and when a script ends."""
    told = model_of(model)
    told.record = record_of(model)
    explained = amp_graph.explain(model).data.fallbacks
    assert [why.partition(": ")[2] for why in explained] == summary_of(told).as_json()["fallbacks"]
    return [*explained]


@pytest.mark.parametrize("is_off", [False, True])
@pytest.mark.parametrize("function", [Product, CastProductOfGpus, CastProduct])
def test_what_runs_in_float32_is_told_of_once(function: type[Function], is_off: bool) -> None:
    with torch._dynamo.config.patch(disable=is_off), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = amp_graph.convert(Net(function), policy=Policy("bfloat16"))
        trained(model)
    why = "in float32: no torch.amp.custom_fwd for the device decorates it"
    name, is_made = function.__name__, function is CastProduct
    (fallback,) = told_of(model)
    assert "runs under autocast: " in fallback
    assert fallback.endswith(f"; {name} {why}") is not is_made
    warned = [str(w.message) for w in told if "custom_fwd" in str(w.message)]
    warning = f"code of Net that is not captured runs {name} {why}"
    assert warned == [warning] * (is_off and not is_made)


@pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning")
def test_what_runs_in_float32_is_told_of_once_though_captured_anew() -> None:
    model = amp_graph.convert(Net(Product), policy=Policy("bfloat16"))
    trained(model)
    model.register_forward_hook(lambda *_: None)
    trained(model)
    (fallback,) = told_of(model)
    assert fallback.count("Product in float32") == 1


def test_what_runs_in_float32_is_told_of_where_warnings_are_errors() -> None:
    model = amp_graph.convert(Net(Product), policy=Policy("bfloat16"))
    with torch._dynamo.config.patch(disable=True), warnings.catch_warnings():
        warnings.simplefilter("error", ConversionWarning)
        with pytest.raises(ConversionWarning, match="is not captured and runs under autocast"):
            model(X)
        with pytest.raises(ConversionWarning, match="runs Product in float32"):
            model(X)
        model(X)
    assert all(plan.fallback is None or plan.autocast for plan in amp_graph.plans(model))
