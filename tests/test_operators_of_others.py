"""Operators of other libraries: on no list, or on one and without a kernel."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import amp_graph

X = torch.randn(4, 8)


def test_an_operator_on_no_list_stays_float32_and_is_named() -> None:
    torch._dynamo.reset()
    with torch.library._scoped_library("amp_graph_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        library._register_fake("twice", lambda x: x * 2)

        class Custom(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.layer(torch.ops.amp_graph_test.twice(self.layer(x)))

        model = amp_graph.convert(Custom())
        with torch.no_grad():
            assert model(X).dtype is torch.float32
        (plan,) = amp_graph.plans(model)
        paint = plan.paints["twice"]
        assert paint.color is amp_graph.Color.DENY
        assert (paint.rule, paint.because) == ("on no list", "amp_graph_test.twice.default")
        assert plan.low >= {"linear", "linear_1"} and "twice" not in plan.low


@pytest.mark.parametrize("written", [False, True], ids=["read", "written in place"])
@pytest.mark.parametrize("color", ["allow", "infer"])
def test_a_kernel_that_refuses_low_precision_is_given_float32(color: str, written: bool) -> None:
    torch._dynamo.reset()

    def only_float32(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.float32:
            raise NotImplementedError(f"no kernel for {x.dtype}")
        return x * 2

    with torch.library._scoped_library("amp_graph_test", "DEF") as library:
        library.define("picky(Tensor x) -> Tensor")
        library.impl("picky", only_float32, "CompositeExplicitAutograd")
        library._register_fake("picky", only_float32)

        class Picky(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                h = torch.ops.amp_graph_test.picky(self.layer(x))
                return self.layer(h.relu_() if written else h.relu())

        plain = Picky()
        lists = {color: {"picky": {"why": "A test.", "ops": ["amp_graph_test.picky"]}}}
        model = amp_graph.convert(copy.deepcopy(plain), policy=amp_graph.Policy(lists=lists))
        with torch.no_grad():
            torch.testing.assert_close(model(X), plain(X), rtol=2e-2, atol=2e-2)
        (plan,) = amp_graph.plans(model)
        assert plan.fallback is None
        paint = plan.paints["picky"]
        assert (paint.rule, paint.because) == ("no kernel", "amp_graph_test.picky.default on cpu")
        assert plan.low >= {"linear", "linear_1"} and "picky" not in plan.low
