"""Models that ask whether they are compiled are told so, and may fail for that."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import amp_graph

GOOD = torch.randn(4, 8)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


class AsksWhetherCompiled(Net):
    """Leaves a step out where it is compiled, and takes a gradient that needs it."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            x.requires_grad_()
        if x.shape[0] != len(GOOD):
            print(end="")
            raise RuntimeError("the wrong length")
        energy = super().forward(x).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


def test_a_step_that_is_left_out_where_compiled_leaves_the_model_to_its_own_code() -> None:
    plain = AsksWhetherCompiled()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    with pytest.warns(amp_graph.ConversionWarning, match="AsksWhetherCompiled runs under") as told:
        results = [model(GOOD.clone()) for _ in range(3)]
    assert len(told) == 1
    for each in results:
        torch.testing.assert_close(each, plain(GOOD.clone()), rtol=0.05, atol=0.05)


@pytest.mark.filterwarnings("error::amp_graph.ConversionWarning")
def test_an_error_of_its_own_is_no_verdict_on_one_that_asks_whether_it_is_compiled() -> None:
    model = amp_graph.convert(AsksWhetherCompiled(), policy="bfloat16")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the wrong length"):
            model(GOOD[1:].clone())
    model(GOOD.clone().requires_grad_())
    assert all(plan.fallback is None for plan in amp_graph.plans(model))


def test_a_stand_in_that_asks_is_no_matter_of_the_models() -> None:
    """One stands for each part that is converted by itself. The model asks nothing, so what it
    raises in its first call is its own, and it runs once."""
    ran: list[int] = []

    class Raises(Net):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            print(end="")
            ran.append(len(x))
            raise RuntimeError("its own")

    model = Raises()
    amp_graph.convert(model.first, policy="bfloat16")
    with pytest.raises(RuntimeError, match="its own"):
        amp_graph.convert(model, policy="bfloat16")(GOOD)
    assert ran == [len(GOOD)]
