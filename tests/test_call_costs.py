"""What a step costs in calls of Python functions of this package, once a model is captured."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
OURS = str(Path(amp_graph.__file__).parent)
MOST = 80  # each takes one to two microseconds where a step is short


def called(run: Callable[[], object]) -> Counter[str]:
    """Return how often each function of the package was called, in the run with the fewest calls:
    Dynamo captures anew under a profiler, the call that follows is watched, and what other tests
    left may be freed in any."""
    found: list[Counter[str]] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            found[-1][frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        for _ in range(6):
            found.append(Counter())
            run()
    finally:
        sys.setprofile(None)
    return min(found, key=Counter.total)


@pytest.mark.parametrize("layers", [1, 8])
def test_there_are_few_calls_whatever_the_number_of_layers(layers: int) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(layers)])
    model = amp_graph.convert(model, policy="bfloat16")
    x = torch.randn(2, 4)
    for _ in range(8):
        model(x).sum().backward()
    found = called(lambda: model(x).sum().backward())
    assert found.total() <= MOST, found
