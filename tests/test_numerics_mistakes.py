"""Mistakes in what comparison and calibration are given: one clear error, or the model's own."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from nets import Net
from torch import nn

import amp_graph
from amp_graph import AmpGraphError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def calibrate_one(model: nn.Module, batch: Any, **options: Any) -> Any:
    return amp_graph.calibrate(model, [batch], 0.1, **options)


LOOKS = [amp_graph.compare, amp_graph.find_nonfinite, calibrate_one]


@pytest.mark.parametrize("look", LOOKS)
def test_a_model_that_refuses_a_batch_raises_its_own_error(look: Any) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        look(Net(), torch.randn(2, 3), policy="bfloat16")
    assert raised.value.__suppress_context__
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        look(Net(), (), policy="bfloat16")


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize(
    ("value", "said"), [(3.0, "float"), (None, "NoneType"), (torch.ones(2), r"one of shape \(2,\)")]
)
def test_a_loss_is_a_scalar(look: Any, value: Any, said: str) -> None:
    with pytest.raises(AmpGraphError, match=f"loss must .*not {said}"):
        look(Net(), torch.randn(2, 8), loss=lambda _: value, policy="bfloat16")


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": 3}, "loss is a function of the model's output, not int 3"),
        ({"loss_scale": "x"}, "loss_scale is a number above 0, not str 'x'"),
        ({"loss_scale": 0.0}, "loss_scale is a number above 0"),
    ],
)
def test_a_loss_can_be_called_and_its_scale_is_a_number(look, options, message) -> None:
    with pytest.raises(AmpGraphError, match=message):
        look(Net(), torch.randn(2, 8), policy="bfloat16", **options)


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("batch", [3, "abc", None])
def test_what_is_no_batch(look: Any, batch: Any) -> None:
    with pytest.raises(AmpGraphError, match="a batch is a tensor, a sequence"):
        look(Net(), batch, policy="bfloat16")


def test_a_drawing_is_svg(tmp_path) -> None:
    found = amp_graph.compare(Net(), torch.randn(2, 8), policy="bfloat16")
    with pytest.raises(AmpGraphError, match=r"ends in \.svg"):
        found.plot(tmp_path / "gradients.png")
    assert not [*tmp_path.iterdir()]


OWN = random.Random(0)


@torch.compiler.disable
def drawn() -> float:
    return OWN.random()


class Random(Net):
    """Draws from a generator of its own, which nobody puts back."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, scale) * drawn()


def test_a_bound_that_cannot_be_met() -> None:
    with pytest.raises(AmpGraphError, match="at least one batch"):
        amp_graph.calibrate(Net(), [], 0.1)
    with pytest.raises(AmpGraphError, match="cannot be met"):
        amp_graph.calibrate(Random(), [torch.randn(4, 8)], 1e-6, policy="float16")


@pytest.mark.parametrize("bound", [float("nan"), -1.0, "x"])
def test_a_bound_is_a_number_that_is_not_negative(bound: Any) -> None:
    with pytest.raises(AmpGraphError, match=f"not {bound!r}"):
        amp_graph.calibrate(Net(), [torch.randn(4, 8)], bound)
    compared = amp_graph.compare(Net(), torch.randn(4, 8), policy="bfloat16")
    for ask in (compared.within, compared.first_above):
        with pytest.raises(AmpGraphError, match=f"not {bound!r}"):
            ask(bound)


@pytest.mark.parametrize("batch", [torch.randn(4, 8), {"x": torch.randn(4, 8)}, 5])
def test_a_single_batch_goes_into_a_list(batch: Any) -> None:
    with pytest.raises(AmpGraphError, match=r"not one (Tensor|dict|int); give \[batch\]"):
        amp_graph.calibrate(Net(), batch, 0.1)


@pytest.mark.parametrize("look", LOOKS)
def test_a_batch_without_samples(look: Any) -> None:
    with pytest.raises(AmpGraphError, match="outputs are empty; give a batch that has samples"):
        look(Net().eval(), torch.randn(0, 8), policy="bfloat16")


class Functional(torch.autograd.Function):
    """Holds what cannot be retraced."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda z: (z**2).sum())(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Functional.apply(self.layer(x))


class Whole(Inside):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.func.grad(lambda z: (self.layer(z) ** 2).sum())(x)


def test_a_bound_that_a_graph_left_to_autocast_does_not_meet() -> None:
    with pytest.raises(AmpGraphError, match=r"cannot be met: .* Graph 0 runs under autocast: not"):
        amp_graph.calibrate(Whole(), [torch.randn(4, 8)], 1e-6, policy="bfloat16")


# Dynamo 2.11 has a function return what it saves, too, so that its result is one of several.
SHOWN = ["aten.linear"] if torch.__version__ >= "2.13" else ["aten.linear", "getitem"]


@pytest.mark.parametrize(
    ("kind", "fallback", "operators"),
    [
        (Whole, "graph 0: runs under autocast: not retraced", []),
        (Inside, "graph 0, fwd_body_0: runs in float32: not retraced", SHOWN),
    ],
)
def test_what_cannot_be_looked_into_is_told(
    kind: type[nn.Module], fallback: str, operators: list[str]
) -> None:
    found = amp_graph.compare(kind(), torch.randn(4, 8), policy="bfloat16")
    (said,) = found.fallbacks
    assert said.startswith(fallback) and said.endswith("; not looked into")
    assert [n.operator for n in found.nodes] == operators and not found.nothing
    assert "Fallbacks" in str(found) and fallback in str(found)


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_that_nothing_was_converted_is_told() -> None:
    found = amp_graph.compare(Doubled(), torch.randn(4, 8), policy="bfloat16")
    assert "Nothing was converted: no operator of it is on the allow list" in str(found)
    assert not found.fallbacks


@pytest.mark.parametrize("look", LOOKS)
def test_a_model_without_parameters_of_which_there_is_no_graph(look: Any) -> None:
    with pytest.raises(
        AmpGraphError, match="no floating-point parameters; there is nothing to convert"
    ):
        look(nn.Identity(), torch.randn(4, 8), policy="bfloat16")


@pytest.mark.parametrize("look", LOOKS)
def test_a_model_without_numbers(look: Any) -> None:
    with pytest.raises(AmpGraphError, match="Net has parameters on the meta device"):
        look(Net().to("meta"), torch.randn(2, 4, device="meta"), policy="bfloat16")


@pytest.mark.parametrize("look", [*LOOKS, amp_graph.export])
def test_what_is_no_model(look: Any) -> None:
    with pytest.raises(AmpGraphError, match=r"(takes|is for) a torch.nn.Module, not function"):
        look(lambda x: x, (torch.randn(2, 4),))


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    @torch.compiler.disable
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.between(self.first(x)) + x


def test_code_between_graphs_is_told_of() -> None:
    found = amp_graph.compare(Broken(), torch.randn(4, 8), policy="bfloat16")
    assert [n.operator for n in found.nodes if n.low] == ["aten.linear"]
    assert all("self.between(self.first(x))" in told for told in found.breaks) and found.breaks
    assert "Graph breaks: code between graphs ran in float32" in str(found)
