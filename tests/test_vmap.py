"""`torch.vmap` inside of a model is a part of its graph."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_mask
from training import assert_same_gradients, distance

import amp_graph
from amp_graph import Override, Policy
from amp_graph.errors import PolicyError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def ensemble(x: Tensor, weights: Tensor) -> Tensor:
    return torch.vmap(lambda w: torch.tanh(x @ w).softmax(-1))(weights).sum(0)


def nested(x: Tensor, weights: Tensor) -> Tensor:
    def row(w: Tensor, one: Tensor) -> Tensor:
        return torch.vmap(lambda number: (number * 0.1).exp())(one @ w)

    rows = torch.vmap(row, in_dims=(None, 0))
    return torch.vmap(lambda w: rows(w, x), in_dims=2)(weights.movedim(0, 2)).sum(0)


def two_in_a_row(x: Tensor, weights: Tensor) -> Tensor:
    many = torch.vmap(torch.mul, in_dims=(0, None))(x, weights[0, 0])
    return torch.vmap(nn.functional.layer_norm, in_dims=(0, None), out_dims=1)(many, (8,)).mT


def of_a_mask(x: Tensor, weights: Tensor) -> Tensor:
    """As transformers make masks out of functions of two positions."""
    rows = torch.arange(8)
    mask = torch.vmap(torch.vmap(torch.ge, in_dims=(None, 0)), in_dims=(0, None))(rows, rows)
    return x @ weights[0].masked_fill(~mask, 0.0)


def of_a_mask_looked_up(x: Tensor, weights: Tensor) -> Tensor:
    """Which words are of one text: a number is an index there, and one of the vmap is not asked
    for, or the `.item()` behind would end the graph."""
    text_of = (weights[0, :1] > 0).long().cumsum(-1)

    def is_same(sample: Tensor, _: Tensor, one: Tensor, two: Tensor) -> Tensor:
        return text_of[sample, one] == text_of[sample, two]

    mask = create_mask(is_same, 1, 1, 8, 8, device="cpu")[0, 0]
    return x @ weights[0].masked_fill(~mask, 0.0) / text_of.max().item()


def random(x: Tensor, weights: Tensor) -> Tensor:
    return torch.vmap(lambda row: row + torch.rand(8) @ weights[0], randomness="different")(x)


FUNCTIONS = (ensemble, nested, two_in_a_row, of_a_mask, of_a_mask_looked_up, random)


class Maps(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weights = nn.Parameter(torch.randn(3, 8, 8))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.function(self.before(x), self.weights))


@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_it_maps_is_in_the_graph(function: Callable[..., Tensor], policy: str) -> None:
    plain = Maps(function)
    model = amp_graph.convert(copy.deepcopy(plain), policy=policy)
    results = []
    for each in (plain, model):
        torch.manual_seed(1)
        results.append(each(torch.randn(4, 8)))
        results[-1].square().mean().backward()
    (plan,) = amp_graph.plans(model)
    assert plan.fallback is None
    assert not any(
        "functorch" in f.op or f.op == "aten.detach.default" for f in plan.facts.values()
    )
    assert distance(results[1], results[0]) < 0.02
    assert_same_gradients(model, plain, 0.05)


def test_its_products_are_low() -> None:
    model = amp_graph.convert(Maps(ensemble), policy="bfloat16")
    model(torch.randn(4, 8))
    (plan,) = amp_graph.plans(model)
    products = [f.name for f in plan.facts.values() if f.group == "matmul"]
    assert len(products) == 3 and plan.low.issuperset(products)


@pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning")
def test_a_mode_inside_leaves_the_graph_to_autocast() -> None:
    def function(x: Tensor, weights: Tensor) -> Tensor:
        def mapped(w: Tensor) -> Tensor:
            with torch.no_grad():
                scale = w.abs().amax()
            return x @ (w / scale)

        return torch.vmap(mapped)(weights).sum(0)

    plain = Maps(function)
    model, x = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16"), torch.randn(4, 8)
    for each in (plain, model):
        each(x).square().mean().backward()
    assert torch._C._functorch.maybe_current_level() is None
    assert_same_gradients(model, plain, 0.05)
    assert "is inside of a vmap" in (amp_graph.plans(model)[0].fallback or "")


class Calls(Maps):
    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.before, x)


def mapped(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(layer)(x)


def with_its_weights(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.func.functional_call(layer, dict(layer.named_parameters()), (x,))


@pytest.mark.parametrize("function", [mapped, with_its_weights])
def test_lines_of_pytorch_between_are_not_told_of(function: Callable[..., Tensor]) -> None:
    raises = Override("deny", where=lambda node: 1 / 0 > 0)
    model = amp_graph.convert(Calls(function), policy=Policy("bfloat16", overrides=(raises,)))
    with pytest.raises(PolicyError, match=r"for placeholder '.*' at test_vmap.py"):
        model(torch.randn(4, 8))
    model = amp_graph.convert(Calls(function), policy="bfloat16")
    model(torch.randn(4, 8))
    (plan,) = amp_graph.plans(model)
    lines = {f.source.partition(":")[0] for f in plan.facts.values() if f.op != "output"}
    assert lines == {"test_vmap.py"}
