"""Models whose graphs cannot be captured while the code between them is under autocast: the graphs
stay, and that code is in float32.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from counting import MatmulCounter
from torch import Tensor, nn
from training import assert_same_gradients
from two_layers import BFLOAT16

import amp_graph
from amp_graph import ConversionWarning
from amp_graph.convert import record_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Scatters(nn.Module):
    """`scatter` takes one dtype, and Dynamo, on which dtypes autocast leaves them, no two."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between, self.behind = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.fails_at, self.calls = 0, 0

    @torch._dynamo.disable
    def uncaptured(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.fails_at:
            raise ValueError("once")
        return self.between(x)

    def placed(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x, dtype=torch.float32).scatter(1, torch.arange(8).repeat(4, 1), x)

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.placed(self.uncaptured(self.before(x))).relu())


class CallsDisabledFirst(Scatters):
    """No graph has run when capture fails, so that settings are tried before."""

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.placed(self.uncaptured(x)).relu())


@torch.library.custom_op("amp_graph_test::not_on_fakes", mutates_args=())
def not_on_fakes(x: Tensor) -> Tensor:
    return x * 2


@not_on_fakes.register_fake
def _(x: Tensor) -> Tensor:
    raise RuntimeError("has no fake")


class NeverCaptured(Scatters):
    """From some call on, with or without autocast."""

    is_hard = False

    def placed(self, x: Tensor) -> Tensor:
        return not_on_fakes(x) if self.is_hard else x.sin()


def low_share(model: nn.Module) -> float:
    with MatmulCounter() as counter:
        model(X)
    return counter.low_share


@pytest.mark.parametrize("kind", [Scatters, CallsDisabledFirst])
@pytest.mark.parametrize("training", [True, False])
def test_graphs_stay(kind: type[Scatters], training: bool) -> None:
    torch.manual_seed(0)
    plain = kind().train(training)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    said = []
    for _ in range(4):
        plain.zero_grad()
        model.zero_grad()
        plain(X).square().mean().backward()
        with warnings.catch_warnings(record=True) as caught:
            loss = model(X).square().mean()
        said += [str(each.message) for each in caught if "autocast" in str(each.message)]
        loss.backward()
        assert_same_gradients(model, plain, within=BFLOAT16)
    assert low_share(model) == (2 / 3 if kind is Scatters else 1 / 2)
    assert len(said) == 1 and "runs in float32: autocast fails (a graph is not captured" in said[0]
    between = [plan for plan in amp_graph.plans(model) if plan.fallback]
    assert [plan.autocast for plan in between] == [False]


@pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning")
def test_an_error_of_the_user_s_in_the_call_that_would_find_out_leaves_that_to_the_next() -> None:
    model = amp_graph.convert(Scatters(), policy="bfloat16")
    model.fails_at = 3  # the call after the first one gets there twice
    model(X)
    with pytest.raises(ValueError, match="once"):
        model(X)
    assert not any("autocast fails" in (plan.fallback or "") for plan in record_of(model).plans)
    model(X)
    assert low_share(model) == 2 / 3


def test_what_is_not_captured_in_either_way_runs_under_autocast() -> None:
    model = amp_graph.convert(NeverCaptured(), policy="bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(X)
        model.is_hard = True
    with pytest.warns(ConversionWarning, match="runs under autocast: not captured") as caught:
        model(X)
    assert not any("runs in float32" in str(each.message) for each in caught)
    assert low_share(model) == 1
