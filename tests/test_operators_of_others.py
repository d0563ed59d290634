"""Operators of other libraries: on no list, or on one and without a kernel."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph import Override, Policy
from amp_graph.__main__ import main
from amp_graph.errors import ListError
from amp_graph.operator_names import close_operator, known_names

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


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.amp_graph_test.shift(self.layer(x))


def test_an_operator_of_another_library_goes_by_its_name_in_the_dispatcher(recwarn) -> None:
    torch._dynamo.reset()
    early = Override("allow", op="amp_graph_test::shift")
    wrong = Override("allow", op="amp_graph_tests::shift")
    with torch.library._scoped_library("amp_graph_test", "DEF") as library:
        library.define("shift(Tensor x) -> Tensor")
        library.impl("shift", lambda x: x + 1, "CompositeExplicitAutograd")
        library._register_fake("shift", lambda x: x + 1)
        listed = {"lists": {"allow": ["amp_graph_test::shift"]}}
        late = Override("allow", op="amp_graph_test::shift.default")
        for options in ({"overrides": (early, wrong)}, {"overrides": late}, listed):
            model = amp_graph.convert(Shifted(), policy=Policy("bfloat16", **options))
            with torch.no_grad():
                model(X)
            assert "shift" in amp_graph.plans(model)[0].low, options
        assert main(["lists", "amp_graph_test::shift"]) == 1
    (warned,) = recwarn.list
    assert "Override(op='amp_graph_tests.shift') names no node of" in str(warned.message)


@pytest.mark.parametrize("name", ["", "mylib/op", "aten.nonsense"])
def test_no_operator_is_near_to_what_is_none(name: str, capsys) -> None:
    assert main(["lists", name]) == 2
    assert "Did you mean" not in capsys.readouterr().err
    with pytest.raises(ListError) as raised:
        Policy(lists={"deny": [name]}).load_lists()
    assert "Did you mean" not in str(raised.value)


def test_operators_are_near_by_what_is_behind_their_namespace(capsys) -> None:
    known = known_names()
    for name, near in (("rleu", "aten.relu"), ("aten::gellu", "aten.gelu"), ("atn.gelu",) * 2):
        expected = near.replace("atn.", "aten.")
        assert close_operator(name, known) == f" Did you mean {expected!r}?"
