"""Models that were given the `__dict__` of a converted one, as `higher` and learn2learn do."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import Net, low_share
from torch import nn

import amp_graph
from amp_graph.autopatch.summary import summary_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X = torch.randn(4, 8)


def clone(model: nn.Module, as_leaf: bool = True) -> Any:
    """As `learn2learn.clone_module` does, with parameters of zero that may be trained."""
    cloned = model.__new__(type(model))
    cloned.__dict__ = model.__dict__.copy()
    for held in ("_parameters", "_buffers", "_modules"):
        setattr(cloned, held, getattr(cloned, held).copy())
    for name, p in model._parameters.items():
        if p is not None:
            cloned._parameters[name] = nn.Parameter(torch.zeros_like(p)) if as_leaf else p * 0
    for name, part in model._modules.items():
        cloned._modules[name] = None if part is None else clone(part, as_leaf)
    return cloned


@pytest.mark.parametrize("part", [False, True], ids=["the model", "a part"])
def test_a_clone_runs_its_own_parameters(part: bool) -> None:
    model = Net()
    converted = amp_graph.convert(model.second if part else model)
    expected = model(X)
    cloned = clone(model)
    assert not amp_graph.is_converted(cloned) and not amp_graph.is_converted(cloned.second)
    assert not cloned(X).any() and not cloned(X).any()
    cloned(X).sum().backward()
    assert cloned.second.bias.grad is not None and model.second.bias.grad is None
    assert amp_graph.is_converted(converted) and torch.equal(model(X), expected)
    assert "_call_impl" not in vars(cloned) and "_call_impl" not in vars(cloned.second)


WAYS: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda model: torch.vmap(model)(X[None]),
    "grad": lambda model: torch.func.grad(lambda x: model(x).sum())(X),
    "in a function": torch.compile(lambda model: model(X), backend="eager"),
    "in no_grad": lambda model: torch.no_grad()(model)(X),
    "deep copy": lambda model: copy.deepcopy(model)(X),
    "copy": lambda model: copy.copy(model)(X),
    "pickle": lambda model: pickle.loads(pickle._dumps(model))(X),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_however_it_is_called(way: Callable[[Any], Any]) -> None:
    model = amp_graph.convert(Net().eval())
    model(X)
    assert not way(clone(model)).any() and model(X).any()


class Cloning(nn.Module):
    """Clones a model that it is given, and calls what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 4)
        self.inner: nn.Module | None = None

    def forward(self, x: torch.Tensor, model: nn.Module) -> torch.Tensor:
        inner = clone(model) if self.inner is None else self.inner
        return self.last(inner(x))


@pytest.mark.parametrize("is_held", [False, True])
def test_a_clone_inside_of_another_model(is_held: bool) -> None:
    model, outer = amp_graph.convert(Net()), amp_graph.convert(Cloning())
    model(X)
    with torch.no_grad():
        expected = outer.last(torch.zeros(4, 4))
    if is_held:
        outer.inner = clone(model)
    for _ in range(2):
        assert torch.allclose(outer(X, model), expected, atol=1e-2)


def test_a_clone_goes_on_when_the_model_is_gone_or_restored() -> None:
    model = amp_graph.convert(Net())
    first, second = clone(model), clone(model)
    amp_graph.restore(model)
    assert not first(X).any()
    del model
    gc.collect()
    assert not second(X).any()
    amp_graph.convert(second)
    assert low_share(second, X) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_clone_in_a_script_is_captured_by_itself(start: Any, dtype: str) -> None:
    installation, model = start(DTYPE=dtype), Net()
    clones = []
    for _ in range(3):  # a validation, and what learns
        model(X)
        clones.append(cloned := clone(model))
        optimizer = torch.optim.SGD(cloned.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (cloned(X) - 1).square().mean().backward()
            optimizer.step()
        assert cloned.second.bias.any()
    assert all(p.grad is None for p in model.parameters())
    told = [summary_of(m).as_json() for m in installation.models.seen]
    assert [m["runs"] for m in told] == [3, 2, 2, 2]
    assert all(m["operators_low"] == m["operators"] for m in told)
    assert all(map(amp_graph.is_converted, (model, *clones)))
    scales = {id(amp_graph.scale_of(m)) for m in (model, *clones)}
    assert len(scales) == (4 if dtype == "float16" else 1)
    late = clone(model)
    installation.undo()
    assert not late(X).any() and not amp_graph.is_converted(clones[0])


def test_a_clone_with_parameters_that_lead_back_to_the_model(start: Any) -> None:
    start()
    model = Net()
    model(X)
    (clone(model, as_leaf=False)(X) - 1).square().mean().backward()
    assert model.second.bias.grad is not None and model.second.weight.grad is not None


class Wrapper(nn.Module):
    """Of a class that calls what it holds by a method that is named as that of all modules."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def _wrapped_call_impl(self, x: torch.Tensor) -> torch.Tensor:
        return self.model._call_impl(x)  # type: ignore[no-any-return, operator]


def test_a_call_by_another_module_is_the_model_s() -> None:
    model = amp_graph.convert(Net())
    assert torch.equal(Wrapper(model)._wrapped_call_impl(X), model(X))
    assert amp_graph.is_converted(model)
