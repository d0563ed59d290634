"""A view has the sizes that it was asked for, where they are symbols."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Block(nn.Module):
    """A layer over windows of 4 by 4, as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        x = F.pad(x, (0, 0, 0, (4 - width % 4) % 4, 0, (4 - height % 4) % 4))
        rows, columns = x.shape[1] // 4, x.shape[2] // 4
        x = x.view(batch, rows, 4, columns, 4, channels).transpose(2, 3)
        x = self.layer(x.contiguous().view(-1, 4, 4, channels))
        x = x.view(-1, rows, columns, 4, 4, channels).transpose(2, 3)
        x = x.contiguous().view(-1, rows * 4, columns * 4, channels)
        return x[:, :height, :width].contiguous()


def sizes(model: nn.Module) -> set[int | str]:
    """The sizes in the graph that a model was last captured in."""
    facts = amp_graph.plans(model)[-1].facts.values()
    return {size for fact in facts for tensor in fact.tensors for size in tensor.shape}


def trained(blocks: int) -> nn.Module:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Block() for _ in range(blocks)))
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for batch, height, width in ((2, 6, 7), (2, 10, 13), (2, 9, 18), (2, 5, 30)):
        x = torch.randn(batch, height, width, 16)
        found = model(x)
        found.sum().backward()
        torch.testing.assert_close(found, plain(x), rtol=0.1, atol=0.1)
    assert len(amp_graph.plans(model)) == 2
    return model


def test_sizes_do_not_grow_from_layer_to_layer() -> None:
    assert sizes(trained(blocks=3)) == sizes(trained(blocks=1))


class Turned(nn.Module):
    """Rows and columns change places, and memory stays."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).view(x.size(1), x.size(0), 4) * 2


def test_only_the_number_of_elements_is_asked() -> None:
    plain = Turned()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for rows, columns in ((2, 3), (4, 6), (6, 5), (4, 4), (8, 4), (5, 7)):
        x = torch.randn(rows, columns, 4)
        torch.testing.assert_close(model(x), plain(x), rtol=0.1, atol=0.1)
    assert len(amp_graph.plans(model)) == 2


class Halved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).view(-1, 2 * x.size(1), 4) * 2


def test_a_view_that_cannot_be_is_the_error_that_it_was() -> None:
    plain = Halved()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for rows, columns in ((2, 3), (4, 6), (0, 6), (5, 7), (8, 5)):
        x = torch.randn(rows, columns, 4)
        if rows % 2 == 0:
            assert model(x).shape == (rows // 2, 2 * columns, 4)
            continue
        with pytest.raises(RuntimeError) as expected:
            plain(x)
        with pytest.raises(RuntimeError, match=re.escape(str(expected.value))):
            model(x)
