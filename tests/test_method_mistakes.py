"""What is refused as a method that runs in mixed precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_graph
from amp_graph import AmpGraphError

X = torch.ones(3, 8)


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 3), nn.Linear(3, 8)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(z)

    @staticmethod
    def shift(x: Tensor) -> Tensor:
        return x + 1

    @property
    def width(self) -> int:
        return 8

    def batches(self) -> Any:
        yield X

    async def later(self, x: Tensor) -> Tensor:
        return self.decode(x)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ("encode", r"a sequence of names, such as \('encode',\), not 'encode'"),
        ((Coder.encode,), "a sequence of names"),
        (5, "a sequence of names"),
        ((name for name in ["encode"]), "a sequence of names"),
        (("forward",), "Coder.forward is a method of every module"),
        (("__call__",), "Coder.__call__ is a method of every module"),
        (("encoder",), "Coder.encoder is a module; convert it by itself"),
        (("encod",), "Coder.encod is no method. Did you mean 'encode'?"),
        (("shift",), "Coder.shift is no method"),
        (("width",), "Coder.width is no method"),
        (("batches",), "Coder.batches is a generator"),
        (("later",), "Coder.later is asynchronous"),
    ],
)
def test_what_cannot_be_converted_is_refused(methods: Any, message: str) -> None:
    model = Coder()
    before = {**vars(model)}
    with pytest.raises(AmpGraphError, match=message):
        amp_graph.convert(model, methods=methods)
    assert vars(model) == before


def test_a_method_behind_an_attribute_is_refused() -> None:
    model = Coder()
    model.decode = lambda z: z
    with pytest.raises(AmpGraphError, match=r"Coder\.decode is hidden by an attribute"):
        amp_graph.convert(model, methods=("decode",))
