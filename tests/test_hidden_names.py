"""What a module keeps under the name of a property whose getter raises AttributeError."""

from __future__ import annotations

import copy

import pytest
import torch
from nets import low_share
from torch import Tensor, nn

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Hidden(nn.Module):
    """As the models of pytorch_tabular: `nn.Module.__setattr__` takes what the property is for."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)
        self.shift = nn.Parameter(torch.ones(4))
        self.register_buffer("factor", torch.tensor(2.0))

    head = property(lambda self: self._head)
    shift = property(lambda self: self._shift)

    def forward(self, x: Tensor) -> Tensor:
        return (self.head(self.body(x).relu()) + self.shift) * self.factor


class Chosen(Hidden):
    """The getter finds something, which then it is, whatever the module keeps."""

    head = property(lambda self: self.body)
    shift = property(lambda self: self.factor)


class Missing(Hidden):
    """There is nothing, and the model knows."""

    head = property(lambda self: self._head)
    other = property(lambda self: self._other)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if getattr(self, "other", None) is None else x


@pytest.mark.parametrize("kind", [Hidden, Chosen, Missing])
@pytest.mark.filterwarnings("error::amp_graph.ConversionWarning")
def test_it_is_what_python_finds(kind: type[nn.Module]) -> None:
    plain = kind()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    x = torch.randn(4, 8)
    torch.testing.assert_close(model(x), plain(x), rtol=0.05, atol=0.05)
    (plan,) = amp_graph.plans(model)
    assert plan.fallback is None and low_share(model, x) == 1
    assert "Graph breaks" not in str(amp_graph.explain(model))
    paths = {facts.module_path for facts in plan.facts.values()}
    assert kind is Chosen or "head" in paths, paths


def test_what_nobody_finds_raises_what_python_raises() -> None:
    class Asks(Missing):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.other

    model = amp_graph.convert(Asks(), policy="bfloat16")
    with pytest.raises(AttributeError, match="other"):
        model(torch.randn(4, 8))
