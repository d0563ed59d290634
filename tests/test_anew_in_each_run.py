"""Looking into a model whose calls change something beside it, so that each run captures anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


class Masked(nn.Module):
    """Attention of a kind, under a mask of its own making."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.values = nn.Linear(16, 8), nn.Linear(8, 4)
        self.kept: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.tril(torch.ones(8, 8)).log()
        return self.values((self.scores(x) + mask).softmax(-1))


def filling_a_list(model: Masked) -> None:
    seen: list[torch.Tensor] = []
    model.values.register_forward_hook(lambda module, args, output: seen.append(output.detach()))


def filling_a_dictionary(model: Masked) -> None:
    def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        model.kept["values"] = output.detach()

    model.values.register_forward_hook(keep)


hooks = pytest.mark.parametrize("hook", [filling_a_list, filling_a_dictionary])


@hooks
def test_comparisons_have_all_nodes(hook: Callable[[Masked], None]) -> None:
    torch.manual_seed(0)
    model = Masked()
    plain = amp_graph.compare(model, X, policy="bfloat16")
    hook(model)
    hooked = amp_graph.compare(model, X, policy="bfloat16")
    assert hooked.nodes == plain.nodes != ()
    assert not hooked.fallbacks


@hooks
def test_calibration_denies_nodes_in_each_run(hook: Callable[[Masked], None]) -> None:
    model = Masked()
    hook(model)
    found = amp_graph.calibrate(model, [X, X], 1e-6, policy="bfloat16")
    assert found.after <= 1e-6 < found.before
    assert len(found.plans) == 1 and found.denied


@hooks
def test_infinities_that_float32_has_too_are_known(hook: Callable[[Masked], None]) -> None:
    model = Masked()
    hook(model)
    found = amp_graph.find_nonfinite(model, torch.full_like(X, torch.nan), policy="float16")
    assert found is not None and found.in_float32 and found.operator == "placeholder"


def test_a_run_that_goes_another_way_is_named() -> None:
    calls = []

    class Turning(Masked):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return super().forward(x if len(calls) % 2 else x.exp())

    found = amp_graph.compare(Turning(), X, policy="bfloat16")
    assert any("not compared" in fallback for fallback in found.fallbacks)


def test_gradients_are_looked_at_in_inference_mode() -> None:
    torch.manual_seed(0)
    model = Masked()
    outside = amp_graph.compare(model, X, policy="bfloat16")
    with torch.inference_mode():
        inside = amp_graph.compare(model, X, policy="bfloat16")
        made_inside = amp_graph.compare(model, X.clone(), policy="bfloat16")
    assert inside.gradients == made_inside.gradients == outside.gradients > 0
