"""Code that is not captured, of models in float16: its gradients are true whatever way they take.

A recurrent layer on packed sequences is the code between graphs. The first call runs it in float32,
later ones under autocast.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from nets import low_share
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from training import assert_same_gradients, distance

import amp_graph

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning"),
]

X, LENGTHS = torch.randn(2, 3, 8), torch.tensor([3, 2])
BFLOAT16 = 0.03  # its roundings are eight times float16's


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.last = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 8)

    def encode(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        if lengths is None:
            return self.rnn(x)[0]
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.last(self.encode(x, lengths))

    def loss(self) -> Tensor:
        return self(X, LENGTHS).square().mean()


class LossOnTheSide(Packed):
    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        hidden = self.encode(x, lengths)
        self.extra = self.last(hidden).square().mean()
        return hidden

    def loss(self) -> Tensor:
        return super().loss() + self.extra


class Unregistered(Packed):
    def __init__(self) -> None:
        super().__init__()
        self.outside = [torch.full((8,), 0.5, requires_grad=True)]

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.last(self.encode(x, lengths) * self.outside[0])


class Carries(Packed):
    def __init__(self) -> None:
        super().__init__()
        self.kept: Tensor | None = None

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        hidden = self.last(self.encode(x, lengths))
        if self.kept is not None:
            hidden = hidden + self.last(self.kept)
        self.kept = hidden
        return hidden

    def loss(self) -> Tensor:
        self.kept = None
        return super().loss() + super().loss()


class _Again(torch.autograd.Function):
    """Runs a part of the model again in its backward, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, part: nn.Module, x: Tensor) -> Tensor:
        ctx.part = part
        ctx.save_for_backward(x)
        with torch.no_grad():
            return part(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.part(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


class RunsAgain(Packed):
    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return _Again.apply(self.last, self.encode(x, lengths))


@pytest.mark.parametrize("kind", [Packed, LossOnTheSide, Unregistered, Carries, RunsAgain])
def test_gradients_are_true(kind: type[Packed]) -> None:
    plain = kind()
    model = amp_graph.convert(copy.deepcopy(plain), policy="float16")
    for _ in range(3):
        for each in (plain, model):
            each.zero_grad()
            each.loss().backward()
        assert_same_gradients(model, plain, within=BFLOAT16)
        if isinstance(plain, Unregistered):
            mine, theirs = model.outside[0], plain.outside[0]
            assert distance(mine.grad, theirs.grad) <= BFLOAT16
            mine.grad = theirs.grad = None
    between = [p for p in amp_graph.plans(model) if "code between graphs" in (p.fallback or "")]
    assert [(p.dtype, p.autocast) for p in between] == [(torch.bfloat16, True)]
    assert low_share(model, X, LENGTHS) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_later_call_may_be_the_first_with_code_between_graphs(dtype: str) -> None:
    model = amp_graph.convert(Packed(), policy=dtype)
    model(X)  # captured whole
    for _ in range(2):
        model(X, LENGTHS)
    assert low_share(model, X, LENGTHS) == 1
    assert any("code between graphs" in (p.fallback or "") for p in amp_graph.plans(model))


def test_what_ran_before_an_error_of_the_model_is_not_held_against_it() -> None:
    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            hidden = self.first(x)
            if y is None:
                raise ValueError("y is missing")
            return self.last(hidden * y)

    model = amp_graph.convert(Strict(), policy="float16")
    with pytest.raises(ValueError, match="y is missing"):
        model(X[0])
    for _ in range(3):
        model(X[0], X[0]).sum().backward()
    assert [p.fallback for p in amp_graph.plans(model)] == [None]


class Counts(nn.Module):
    """Of its second graph Dynamo sees other code, which fails."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        hidden = nn.functional.dropout(self.norm(self.first(x)), 0.5)
        torch._dynamo.graph_break()
        if torch.compiler.is_compiling():
            hidden = hidden + torch.ones(3)
        return self.last(hidden)


def test_a_call_that_begins_again_counts_once() -> None:
    plain = Counts()
    model = amp_graph.convert(copy.deepcopy(plain), policy="float16")
    x = torch.randn(6, 8)
    results = []
    for each in (plain, model):
        torch.manual_seed(3)
        results.append(each(x))
    assert any("not captured" in (p.fallback or "") for p in amp_graph.plans(model))
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, rtol=0.02, atol=0.02)
    torch.testing.assert_close(*results, rtol=0.05, atol=0.05)  # the same numbers were dropped


def test_so_does_one_that_fails_under_autocast() -> None:
    class Fails(Packed):
        def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
            hidden = nn.functional.dropout(self.encode(x, lengths), 0.5)
            return self.summed(hidden[0])

        @torch.compiler.disable
        def summed(self, rows: Tensor) -> Tensor:
            """The sum is in float32, what is added to it is not under autocast."""
            return torch.zeros(3, 8).index_add_(0, torch.arange(3), self.last(rows))

    plain = Fails()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for _ in range(3):
        results = []
        for each in (plain, model):
            torch.manual_seed(3)
            results.append(each(X, LENGTHS))
        torch.testing.assert_close(*results, rtol=0.05, atol=0.05)


def test_no_more_is_said_than_is_true() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = amp_graph.convert(Packed(), policy="float16")
        for _ in range(3):
            model(X, LENGTHS).sum().backward()


class Between(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(8, 8) for _ in range(3))

    @torch.compiler.disable
    def between(self, x: Tensor) -> Tensor:
        return self.middle(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_graph_behind_code_under_autocast_takes_what_it_left(mode: Any) -> None:
    """In inference mode no tensor counts what is written to it."""
    model = amp_graph.convert(Between(), policy="bfloat16")
    with mode():
        for _ in range(3):
            model(X)
        assert low_share(model, X) == 1
    assert all("float32" not in (plan.otherwise or "") for plan in amp_graph.plans(model))


@dataclass(frozen=True)
class Output:
    hidden: list[Tensor]
    name: str = "output"


class InADataclass(Between):
    def forward(self, x: Tensor) -> Any:
        return {"output": Output([self.between(self.first(x))])}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_in_a_dataclass_have_the_dtype_that_they_had(dtype: torch.dtype) -> None:
    output_dtype = None if dtype is torch.float32 else dtype
    policy = amp_graph.Policy("bfloat16", output_dtype=output_dtype)
    model = amp_graph.convert(InADataclass(), policy=policy)
    for _ in range(3):  # under autocast from the second on
        output = model(X)["output"]
        assert isinstance(output, Output) and output.name == "output"
        assert [t.dtype for t in output.hidden] == [dtype]


class Causal(nn.Module):
    """Makes a tensor of a subclass that no dispatch mode may see."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.nn.attention.bias import causal_lower_right

        q = self.layer(x)
        mask = causal_lower_right(q.shape[-2], q.shape[-2])
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)


def test_a_model_that_cannot_run_under_a_mode_runs() -> None:
    model, x = Causal(), torch.randn(2, 2, 4, 8)
    expected = model(x)
    amp_graph.convert(model)
    for _ in range(2):
        torch.testing.assert_close(model(x), expected, rtol=2e-2, atol=2e-2)


def test_weights_that_are_held_otherwise_leave_a_model_to_autocast() -> None:
    """As quantised ones are, of which operators make tensors that no graph has seen."""
    model = nn.Sequential(nn.Linear(8, 8))
    weight = model[0].weight.detach()
    model[0].weight = nn.Parameter(TwoTensor(weight, weight.clone()))
    amp_graph.convert(model, policy="bfloat16")
    model(X)
    (plan,) = amp_graph.plans(model)
    assert plan.autocast and "(CaptureError: 0.weight is held as TwoTensor)" in str(plan.fallback)
