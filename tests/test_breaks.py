"""Models that Dynamo cannot capture, or not as a whole: what is done, and what is said."""

from __future__ import annotations

import contextlib
import copy
import random

import numpy as np
import pytest
import torch
from nets import low_share
from torch import Tensor, nn
from training import assert_same_gradients

import amp_graph
from amp_graph import ConversionWarning
from amp_graph.capture.breaks import MODEL, each_once
from amp_graph.capture.budget import MAX_CAPTURES

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


class BranchesOnData(nn.Module):
    """`asks` gives a number that Python goes on with, or a tensor of no size known before."""

    def __init__(self, asks) -> None:
        super().__init__()
        self.first, self.second, self.asks = nn.Linear(8, 8), nn.Linear(8, 8), asks

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        rows = self.asks(hidden)
        return self.second(hidden[rows]) if len(rows) % 2 else self.second(2 * hidden[rows])


@pytest.mark.parametrize(
    ("asks", "told"),
    [
        (lambda x: range(int(x.abs().sum()) % 4 + 1), "takes a number out of a tensor"),
        (lambda x: x.sum(1).nonzero()[:, 0], "depends on the numbers in a tensor"),
    ],
)
@pytest.mark.parametrize("around", [contextlib.nullcontext(), torch.device("cpu")])
def test_a_break_at_data_is_told_in_words_and_not_by_a_setting(asks, told: str, around) -> None:
    model = amp_graph.convert(BranchesOnData(asks))
    with around:  # a default device, say, through whose mode each call goes
        model(torch.randn(4, 8)).sum().backward()
    (found,) = amp_graph.explain(model).data.breaks
    assert told in found and "test_breaks.py" in found


@pytest.mark.filterwarnings("error::amp_graph.ConversionWarning")
def test_what_others_capture_meanwhile_is_not_held_against_it() -> None:
    model = amp_graph.convert(DiffersWhenCompiled())
    with pytest.warns(ConversionWarning, match="not captured"):
        model(torch.randn(4, 8))
    numbers = iter(range(2 * MAX_CAPTURES))

    def capture(*_: object) -> None:
        torch.compile(eval(f"lambda x: x + {next(numbers)}"), backend="eager")(torch.ones(1))

    model.register_forward_hook(capture)
    for _ in range(MAX_CAPTURES + 1):
        model(torch.randn(4, 8))
    assert len(amp_graph.plans(model)) == 1


class Seeded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        seed = torch.randint(0, 1000, ()).item()
        for _ in range(random.Random(seed).randrange(1, 4)):
            x = self.layer(x)
        return x


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="nor can Dynamo 2.14 between graphs")
@pytest.mark.filterwarnings("error::amp_graph.ConversionWarning")
def test_what_dynamo_cannot_do_with_a_drawn_number_is_left_between_graphs() -> None:
    model, x = amp_graph.convert(Seeded()), torch.randn(4, 8)
    torch.manual_seed(0)
    y = model(x)
    torch.manual_seed(0)
    torch.testing.assert_close(y, Seeded.forward(model, x), rtol=0.02, atol=0.02)
    assert low_share(model, x) == 1


def images() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 2))


@pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_numpy_that_knows_no_low_precision_is_given_none(dtype: str) -> None:
    """As those do who show what a layer saw: NumPy in a forward hook and in a backward hook."""
    model, seen = images(), []
    model[1].register_forward_hook(lambda _, __, out: seen.append(out.detach().numpy()))
    model[1].register_full_backward_hook(lambda _, __, grads: seen.append(grads[0].numpy()))
    amp_graph.convert(model, policy=dtype)
    for _ in range(3):
        model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert len(seen) == 6 and {str(array.dtype) for array in seen} == {"float32"}


def test_a_hook_that_knows_no_low_precision_costs_it_once() -> None:
    model = images()
    model[1].register_forward_hook(lambda _, __, out: print(out.detach().numpy().dtype))
    with pytest.warns(ConversionWarning, match="runs in float32: autocast fails .TypeError"):
        amp_graph.convert(model)
        for _ in range(3):
            model(torch.randn(1, 3, 8, 8))


class Gathering(nn.Module):
    """Dynamo fails in an assertion of its own (torch 2.13)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.index = nn.Linear(8, 8), np.arange(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[:, self.index]


@pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning")
def test_an_assertion_inside_of_dynamo_costs_no_more_than_capture() -> None:
    with torch.inference_mode():
        assert amp_graph.convert(Gathering())(torch.ones(2, 8)).shape == (2, 4)


class Padded(Gathering):
    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        torch._dynamo.graph_break()
        longest = (x > 0).sum(1).max()
        padded = torch.zeros(len(x), longest)  # type: ignore[arg-type]
        assert list(padded.size()) == [len(x), longest]
        return h + padded.sum()


def test_a_size_compared_with_a_tensor_costs_no_more_than_capture() -> None:
    """As Longformer's, which depends on data."""
    model = amp_graph.convert(Padded(), policy="bfloat16")
    model(torch.randn(3, 8))
    assert not any(plan.otherwise for plan in amp_graph.plans(model))


class Skipped(nn.Module):
    """Between two graphs a layer that is never captured; from the second call on its results are
    in low precision."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.writes = nn.LayerNorm(8), writes

    @torch._dynamo.disable
    def run_middle(self, x: Tensor) -> Tensor:
        return self.middle(x)

    @torch._dynamo.disable
    def run_last(self, x: Tensor) -> Tensor:
        return x.float() * 2

    def forward(self, x: Tensor) -> Tensor:
        x = self.run_middle(self.first(x).relu())
        if self.writes:
            x += 1
        y = self.last(self.norm(x).relu())
        return self.run_last(x) + y


@pytest.mark.filterwarnings("error::amp_graph.ConversionWarning")
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_graph_behind_code_under_autocast_is_rewritten(dtype: str, writes: bool) -> None:
    plain = Skipped(writes)
    model, x = amp_graph.convert(copy.deepcopy(plain), policy=dtype), torch.randn(4, 8)
    for _ in range(3):
        outs = []
        for each in (plain, model):
            each.zero_grad()
            outs.append(each(x))
            outs[-1].square().mean().backward()
        torch.testing.assert_close(*outs, rtol=0.02, atol=0.05)
        assert_same_gradients(model, plain, within=0.03)
    assert all(plan.fallback is None for plan in amp_graph.plans(model) if plan.facts)
    assert low_share(model, x) == 1


class Pair(tuple):
    """Dynamo takes its items by `[]` when it writes the guards of a graph."""

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        raise NotImplementedError


class Unpacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.pair = nn.Linear(8, 8), Pair((1, 2))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.pair
        return self.layer(x) * (a + b)


def test_an_error_that_says_nothing_is_told_by_where_it_comes_from() -> None:
    model = amp_graph.convert(Unpacks(), policy="bfloat16")
    with pytest.warns(
        ConversionWarning, match=r"test_breaks.py:\d+, __getitem__: NotImplementedError\)$"
    ):
        model(torch.randn(4, 8))


class Checks(nn.Module):
    """Breaks in a loop, after which Dynamo cannot go on in the frames around it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def checked(self, x: Tensor) -> Tensor:
        if not torch.isfinite(x).all():
            x = x.clamp(-1, 1)
        return x

    def forward(self, x: Tensor) -> Tensor:
        try:
            for layer in self.layers:
                x = self.checked(layer(x))
        finally:
            self.calls = 1
        return x


def test_one_break_is_told_once_and_not_of_each_frame_around_it() -> None:
    model = amp_graph.convert(Checks())
    model(torch.randn(4, 8)).sum().backward()
    (found,) = amp_graph.explain(model).data.breaks
    assert "if not torch.isfinite(x).all(): Python branches" in found


class OnSparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return torch.sparse.mm(edges, x @ self.weight)


def test_the_call_of_the_model_is_told_of_if_no_frame_is() -> None:
    model = amp_graph.convert(OnSparse(), policy="bfloat16")
    with pytest.warns(ConversionWarning, match="nothing is captured") as warned:
        model(torch.randn(3, 4), torch.eye(3).to_sparse())
    (said,) = (str(w.message) for w in warned if "nothing is captured" in str(w.message))
    assert "in forward: " in said and MODEL not in said
    reason = "net.py:12, in forward: loops"
    assert each_once([f"{MODEL}: loops", reason, reason, f"{MODEL}: raises"]) == [
        reason,
        f"{MODEL}: raises",
    ]
    assert each_once([f"{MODEL}: loops", reason, "net.py:14, x: loops"]) == ["net.py:14, x: loops"]
