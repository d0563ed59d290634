"""Dictionaries whose items are attributes by a method of `dict`, as configurations often are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nets import low_share
from torch import Tensor, nn

import amp_graph

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("error::amp_graph.ConversionWarning"),
]
X = torch.ones(4, 8)


class Gets(dict[str, Any]):
    __getattr__ = dict.get
    __setattr__ = dict.__setitem__


class GetsItems(dict[str, Any]):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class ConvertsItems(GetsItems):
    """Its own `__getitem__` is not what finds attributes."""

    def __getitem__(self, name: str) -> Any:
        raise TypeError(name)


class Net(nn.Module):
    def __init__(self, options: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        self.options.calls = self.options.calls + 1
        x = self.layer(x) * self.options.gain
        return x * self.late() * len(self.options)

    def late(self) -> Any:
        try:
            return self.options.late or 1.0
        except KeyError:
            return 2.0


@pytest.mark.parametrize("kind", [Gets, GetsItems, ConvertsItems])
def test_a_model_that_reads_them_is_captured(kind: type[Any]) -> None:
    plain = Net(kind(gain=0.5, calls=0))
    model = amp_graph.convert(Net(kind(gain=0.5, calls=0)), policy="bfloat16")
    model.load_state_dict(plain.state_dict())
    for call in range(6):
        if call == 2:
            for each in (plain, model):
                each.options.gain = 3.0
        if call == 4:
            for each in (plain, model):
                each.options.late = 5.0
        torch.testing.assert_close(model(X), plain(X), rtol=0.05, atol=0.05)
    assert low_share(model, X) == 1
    assert model.options.calls == 7
