"""Tensors of a class with `__torch_function__`, and what is kept in their `__dict__`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Image(Tensor):
    """Operators hand on what is kept in the first operand, as with fastai."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        keeping = [arg for arg in args if hasattr(arg, "__dict__")]
        if isinstance(result, Image) and keeping:
            result.take_from(keeping[0])
        elif isinstance(result, tuple) and keeping:
            [part.take_from(keeping[0]) for part in result if isinstance(part, Image)]
        return result


def take_from(self: Any, other: Any) -> None:
    self.__dict__ = copy.copy(other.__dict__)


@pytest.fixture(autouse=True)
def _method_of_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "take_from", take_from, raising=False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


class Asks(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * getattr(y, "factor", 1)


def image(**attributes: Any) -> Any:
    made: Any = torch.linspace(-1, 1, 32).reshape(4, 8).as_subclass(Image)
    made.__dict__.update(attributes)
    return made


def converted(net: nn.Module) -> nn.Module:
    return amp_graph.convert(copy.deepcopy(net), policy="bfloat16")


def same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert vars(found) == vars(expected)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


@pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="Dynamo of torch 2.11 captures no method that a library has given to all tensors",
)
def test_a_tensor_of_a_class_is_captured_whole() -> None:
    net = Net()
    model = converted(net)
    same(model(image()), net(image()))
    (plan,) = amp_graph.plans(model)
    assert plan.fallback is None and plan.paints


@pytest.mark.parametrize("first", [{}, {"factor": 3.0}])
@pytest.mark.parametrize("kind", [Net, Asks])
def test_what_a_tensor_keeps_is_handed_on(first: dict[str, float], kind: type[Net]) -> None:
    net = kind()
    model = converted(net)
    for attributes in (first, {"factor": 3.0}, {"factor": 5.0}, {}):
        same(model(image(**attributes)), net(image(**attributes)))


def test_what_the_model_keeps_in_a_tensor_is_handed_on() -> None:
    class Keeps(Asks):
        def forward(self, x: Any) -> Tensor:
            y: Any = self.first(x)
            y.factor = 3.0
            z = y.relu()
            return super().forward(z.reshape(z.shape[-2:]))

    net = Keeps()
    model = converted(net)
    for _ in range(2):
        same(model(image()), net(image()))


def test_a_library_may_put_its_own_method_in_place_of_as_subclass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Tensor.as_subclass

    def as_subclass(self: Tensor, kind: type) -> Any:
        result = own(self, kind)
        torch._dynamo.graph_break()
        return result

    class Casts(Net):
        def forward(self, x: Any) -> Tensor:
            return super().forward(x).as_subclass(Tensor).as_subclass(Image)

    monkeypatch.setattr(Tensor, "as_subclass", as_subclass)
    net = Casts()
    model = converted(net)
    for _ in range(2):
        same(model(image()), net(image()))
