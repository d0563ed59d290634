"""What is said of a model that cannot be captured."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import amp_graph
from amp_graph import ConversionWarning
from amp_graph.captured_calls import MAX_CAPTURES_IN_A_ROW

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class DiffersWhenCompiled(nn.Module):
    """Like masks of transformers, which are made otherwise while a compiler looks on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y + torch.ones(3) if torch.compiler.is_compiling() else y


def test_why_a_model_is_not_captured_says_where_and_what() -> None:
    model = amp_graph.convert(DiffersWhenCompiled())
    where_and_what = r"test_breaks.py:\d+, return y \+ torch.ones\(3\).*: .*broadcast a dimension"
    with pytest.warns(ConversionWarning, match=where_and_what):
        model(torch.randn(4, 8))
    (plan,) = amp_graph.plans(model)
    assert plan.autocast and "\n" not in plan.fallback


@pytest.mark.filterwarnings("error::amp_graph.ConversionWarning")
def test_what_others_capture_meanwhile_is_not_held_against_it() -> None:
    model = amp_graph.convert(DiffersWhenCompiled())
    with pytest.warns(ConversionWarning, match="not captured"):
        model(torch.randn(4, 8))
    numbers = iter(range(2 * MAX_CAPTURES_IN_A_ROW))

    def capture(*_: object) -> None:
        torch.compile(eval(f"lambda x: x + {next(numbers)}"), backend="eager")(torch.ones(1))

    model.register_forward_hook(capture)
    for _ in range(MAX_CAPTURES_IN_A_ROW + 1):
        model(torch.randn(4, 8))
    assert len(amp_graph.plans(model)) == 1
