"""Comparison and calibration where there is nothing in common to compare."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from nets import Net
from torch import Tensor, nn

import amp_graph
from amp_graph import AmpGraphError
from amp_graph.__main__ import main
from amp_graph.numerics.statistics import relative_error, statistics

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
NAN = float("nan")


def test_errors_of_nothing_are_no_numbers() -> None:
    nothing = torch.full((3,), NAN)
    assert math.isnan(statistics(nothing, nothing).error)
    assert math.isnan(relative_error([], []))
    assert math.isnan(relative_error([nothing], [nothing]))


class Returns(nn.Module):
    """`what` of its layer."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.layer, self.what = nn.Linear(8, 8), what

    def forward(self, x: Tensor) -> Any:
        return self.what(self.layer(x))


NOTHING = [lambda y: None, lambda y: (y > 0).sum()]


@pytest.mark.parametrize("what", NOTHING)
def test_a_model_that_returns_nothing_to_compare(what: Any) -> None:
    found = amp_graph.compare(Returns(what), torch.randn(4, 8), policy="bfloat16")
    assert math.isnan(found.outputs) and math.isnan(found.gradients)
    assert not found.within(1.0) and found.nodes
    assert "error of outputs –, of the loss –, of gradients –" in str(found)
    assert "no floating-point tensor is returned" in str(found)
    with pytest.raises(AmpGraphError, match="no floating-point tensor and has no gradients"):
        amp_graph.calibrate(Returns(what), [torch.randn(4, 8)], 0.1, policy="bfloat16")


def test_a_batch_of_which_float32_itself_makes_nan() -> None:
    batch = torch.full((4, 8), NAN)
    found = amp_graph.compare(Net(), batch, policy="bfloat16")
    assert found.not_finite == {"outputs": 1.0, "loss": 1.0, "gradients": 1.0}
    assert math.isnan(found.outputs) and not found.within(math.inf)
    said = "float32 itself is not finite in 100% of outputs, 100% of the loss, 100% of gradients"
    assert said in str(found)
    with pytest.raises(AmpGraphError, match=r"not finite, in 100\.0% of outputs.* of batch 1"):
        amp_graph.calibrate(Net(), [torch.randn(4, 8), batch], 0.1, policy="bfloat16")


def test_some_gradients_of_which_float32_itself_makes_nan() -> None:
    def loss(y: Tensor) -> Tensor:
        return (y[:, 0] * 0).sqrt().sum() + y.square().mean()

    batch = torch.randn(4, 8)
    found = amp_graph.compare(Net(), batch, loss=loss, policy="bfloat16")
    assert "outputs" not in found.not_finite and found.outputs < 0.1
    assert not found.within(1.0)
    with pytest.raises(AmpGraphError, match="of gradients of batch 0"):
        amp_graph.calibrate(Net(), [batch], 0.5, loss=loss, policy="bfloat16")


def masked(y: Tensor) -> Tensor:
    return y.masked_fill(torch.arange(8) < 2, -math.inf)


def test_values_that_are_infinite_on_purpose_are_left_out() -> None:
    options = {"loss": lambda y: y[:, 2:].square().mean(), "policy": "bfloat16"}
    found = amp_graph.compare(Returns(masked), torch.randn(4, 8), **options)
    assert found.not_finite == {"outputs": 0.25} and found.within(0.1)
    assert amp_graph.calibrate(Returns(masked), [torch.randn(4, 8)], 0.1, **options).after < 0.1


def test_outputs_alone_are_compared_where_nothing_is_trained() -> None:
    found = amp_graph.compare(Net().requires_grad_(False), torch.randn(4, 8), policy="bfloat16")
    assert math.isnan(found.gradients) and found.within(0.1) and not found.within(1e-9)


class Steps(Net):
    def forward(self, x: Tensor) -> Any:
        yield super().forward(x)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Net().bfloat16(), "parameters in bfloat16 only"),
        (Net().double(), "parameters in float64 only"),
        (nn.ReLU(), "no floating-point parameters"),
        (Steps(), "forward is a generator"),
        (3, r"(compare|calibrate)\(\) takes a torch.nn.Module, not int"),
    ],
)
def test_what_convert_refuses_is_refused(model: Any, message: str) -> None:
    with pytest.raises(AmpGraphError, match=message):
        amp_graph.compare(model, torch.randn(4, 8))
    with pytest.raises(AmpGraphError, match=message):
        amp_graph.calibrate(model, [torch.randn(4, 8)], 0.1)


FACTORY = """
import torch
from torch import nn
class Net(nn.Linear):
    def forward(self, x):
        super().forward(x)
def factory():
    return Net(4, 4), (torch.randn(2, 4),)
"""


def test_a_bound_is_not_met_by_nothing(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "returns_none.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    given = ["returns_none:factory", "--dtype", "bfloat16", "--bound", "1"]
    assert main(["compare", *given]) == 1
    assert "error of outputs –" in capsys.readouterr().out
    assert main(["calibrate", *given, "--output", str(tmp_path / "plan.json")]) == 2
    assert not (tmp_path / "plan.json").exists()
