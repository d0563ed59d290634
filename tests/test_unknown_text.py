"""Text of numbers that depend on data is what it is in Python, whatever is done to it."""

# ruff: noqa: UP031, UP032 (all ways to make text are tested)

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_graph

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning"),
]
MADE: dict[str, Callable[[int], str]] = {
    "f": lambda n: f"p{n}",
    "percent": lambda n: "p%d" % n,
    "format": lambda n: "p{}".format(n),
}
USES: dict[str, Callable[[str], Any]] = {
    "itself": lambda text: text,
    "equal": lambda text: text == "p4",
    "unequal": lambda text: text != "p4",
    "less": lambda text: text < "p5",
    "one of": lambda text: text in ("p4", "p6"),
    "a key of": lambda text: text in {"p4": 1},
    "by key": lambda text: {"p4": 3}.get(text, 0),
    "a new key": lambda text: {text: 1, "p4": 2},
    "in a set": lambda text: len({text, "p4"}),
    "equal in a list": lambda text: [text] == ["p4"],
    "equal in a tuple": lambda text: (text, 1) == ("p4", 1),
    "counted": lambda text: [text, text].count("p4"),
    "part of": lambda text: "4" in text,
    "sorted": lambda text: sorted([text, "p41", "p1"]),
    "added": lambda text: text + "a",
    "joined": lambda text: "-".join(["a", text]),
    "within another": lambda text: f"<{text:>5}>",
    "its length": lambda text: len(text),
    "a number again": lambda text: int(text[1:]),
    "or another": lambda text: text or "nothing",
    "its class": lambda text: (isinstance(text, str), isinstance(text, int), text is None),
}


class Net(nn.Module):
    def __init__(self, made: Callable[[int], str], use: Callable[[str], Any]) -> None:
        super().__init__()
        self.layer, self.made, self.use = nn.Linear(8, 8), made, use

    def forward(self, x: Tensor) -> Any:
        h = self.layer(x)
        return h, self.use(self.made((h > -100).sum().item() // 8))


@pytest.mark.parametrize("made", MADE.values(), ids=MADE.keys())
@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_it_is_what_it_is_in_python(made: Callable[[int], str], use: Callable[[str], Any]) -> None:
    plain = Net(made, use)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for rows in (4, 5):
        assert model(torch.randn(rows, 8))[1] == plain(torch.randn(rows, 8))[1]
