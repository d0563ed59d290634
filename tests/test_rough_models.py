"""Models as they are found: what cannot be captured, cast or traced runs as it did before."""

from __future__ import annotations

import copy
import gc
import logging
import operator
import weakref
from collections.abc import Callable
from logging.handlers import BufferingHandler

import numpy as np
import pytest
import torch
from nets import Net, low_share
from torch import Tensor, fx, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

import amp_graph
from amp_graph import ConversionWarning, Policy
from amp_graph.calls import capture_cache
from amp_graph.dynamo_changes.logs import CAPTURE_LOGS

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X = torch.randn(20, 16)


class Experts(nn.Module):
    """Adds float32 and what autocast makes low into one tensor, which PyTorch refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        _, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, _ = torch.where(chosen == number)
            if rows.numel():
                out.index_add_(0, rows, expert(x[rows]))
        return out


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(torch.eye(len(x)).to_sparse(), self.layer(x))


@pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning", "ignore:Sparse")
@pytest.mark.parametrize("make", [Experts, Sparse])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_autocast_cannot_run_runs_in_float32(make: Callable[[], nn.Module], dtype) -> None:
    plain = make()
    model = amp_graph.convert(copy.deepcopy(plain), policy=dtype)
    for _ in range(3):
        for m in (plain, model):
            m.zero_grad()
            m(X).sum().backward()
        torch.testing.assert_close(model(X), plain(X), rtol=0, atol=0.05)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, rtol=0.05, atol=0.5)
    assert any("runs in float32" in str(plan.otherwise) for plan in amp_graph.plans(model))


class Cropped(nn.Module):
    """A number drawn in the model chooses from a Python tuple, as detectors choose a size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.sizes = nn.Linear(16, 8), (3, 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        size = self.sizes[int(torch.empty(1).uniform_(0.0, 3.0).item())]
        return self.layer(x)[:, :size]


def test_a_drawn_number_may_index_a_tuple() -> None:
    plain = Cropped()
    model = amp_graph.convert(copy.deepcopy(plain))
    for seed in range(4):
        torch.manual_seed(seed)
        expected = plain(X).shape
        torch.manual_seed(seed)
        assert model(X).shape == expected
    assert all(plan.fallback is None for plan in amp_graph.plans(model))
    assert low_share(model, X) == 1


class Labelled(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.profiler.record_function("labelled"):
            return super().forward(x)


def test_capturing_is_quiet(capfd: pytest.CaptureFixture[str], fresh_dynamo: None) -> None:
    logs, handler = [logging.getLogger(name) for name in CAPTURE_LOGS], BufferingHandler(100)
    for log in logs:
        log.addHandler(handler)
    try:
        amp_graph.convert(Cropped())(X)  # Dynamo has advice
        amp_graph.convert(Labelled())(X[:, :8])
        with pytest.raises(RuntimeError, match=r"cannot be multiplied|reduction dim"):
            amp_graph.convert(Net())(torch.randn(4, 9))  # and would print a traceback of its own
    finally:
        for log in logs:
            log.removeHandler(handler)
    assert not handler.buffer and capfd.readouterr().err == ""
    assert not any(log.filters for log in logs)


class Checking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.shape[1] == 16, f"width {x.shape[1]} is not 16")
        return self.layer(x)


def test_the_message_of_an_error_of_the_model_is_its_own() -> None:
    model = amp_graph.convert(Checking())
    with pytest.raises(AssertionError) as raised:
        model(torch.randn(4, 9))
    assert str(raised.value) == "width 9 is not 16"
    assert low_share(model, X) == 1


def test_so_is_one_in_the_first_run_of_a_graph(capfd: pytest.CaptureFixture[str]) -> None:
    model = amp_graph.convert(Net())
    model(X[:, :8])
    model.double()
    with pytest.raises(RuntimeError, match="same dtype") as raised:
        model(X[:, :8])
    assert raised.value.__context__ is None and capfd.readouterr().err == ""


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps = nn.Linear(16, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.layer(x) * np.random.rand(1)[0]


def test_a_step_counter_is_not_captured_at_each_step_and_numpy_draws_its_own_numbers() -> None:
    plain = Counting()
    model = amp_graph.convert(copy.deepcopy(plain))
    for _ in range(10):
        results = []
        for m in (plain, model):
            np.random.seed(m.steps)
            results.append(m(X))
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=0.05)
    assert model.steps == 10
    assert len(amp_graph.plans(model)) <= 3


@pytest.mark.parametrize("restored", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_converted_model_is_freed(dtype: str, restored: bool) -> None:
    gone = []
    for _ in range(3):
        model = amp_graph.convert(Net(), policy=dtype)
        model(torch.randn(4, 8)).sum().backward()
        if restored:
            amp_graph.restore(model)
        gone.append(weakref.ref(model))
        del model
        gc.collect()
    assert [ref() for ref in gone] == [None] * 3


class Printing(Net):
    """Captured in two graphs."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        print(end="")
        return y.square() @ y.T


@pytest.mark.parametrize("restored", [False, True])
@pytest.mark.parametrize("make", [Net, Printing])
def test_its_low_precision_weights_are_freed_with_it_and_graphs_that_are_not_kept_for_others(
    make: Callable[[], nn.Module], restored: bool
) -> None:
    def alive() -> tuple[int, int]:
        gc.collect()
        objects = gc.get_objects()
        lows = sum(type(x) is Tensor and x.dtype is torch.bfloat16 for x in objects)
        return lows, sum(isinstance(x, fx.GraphModule) for x in objects)

    capture_cache.clear()
    before = alive()
    model = amp_graph.convert(make())
    model(torch.randn(4, 8)).sum().backward()
    assert all(map(operator.gt, alive(), before))
    if restored:
        amp_graph.restore(model)
    else:
        del model
    assert alive()[0] == before[0]
    capture_cache.clear()
    assert alive() == before


def test_all_objects_may_be_asked_what_they_are_after_a_first_call() -> None:
    """As checks for leaks do; what recorded a graph held a dead proxy until a collection."""
    gc.collect()
    gc.disable()
    try:
        amp_graph.convert(Printing())(torch.randn(4, 8)).sum().backward()
        assert sum(isinstance(x, Tensor) for x in gc.get_objects())
    finally:
        gc.enable()


def test_gradients_per_sample() -> None:
    plain = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
    model = amp_graph.convert(copy.deepcopy(plain))
    model(X)

    def per_sample(m: nn.Module) -> dict[str, Tensor]:
        def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(m, parameters, (x[None],)).square().sum()

        parameters = {name: p.detach() for name, p in m.named_parameters()}
        return vmap(grad(loss), in_dims=(None, 0))(parameters, X)

    torch.testing.assert_close(per_sample(model), per_sample(plain))
    assert low_share(model, X) == 1


class Recomputed(nn.Module):
    """Not captured, and run again in backward, with the parameters themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def inner(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return torch.relu(self.second(x))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, self.first(x), use_reentrant=True)


@pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning")
def test_scaled_gradients_of_code_that_runs_again_in_backward_are_true() -> None:
    plain = Recomputed()
    model = amp_graph.convert(copy.deepcopy(plain), policy="float16")
    for _ in range(3):
        for m in (plain, model):
            m.zero_grad()
            m(X).square().mean().backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=0.05, atol=1e-3)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1)[None].topk(2, -1)
        return (weights * chosen).sum()


@pytest.mark.parametrize(("level", "is_low"), [("safe", False), ("balanced", False), ("max", True)])
def test_what_orders_elements_is_not_rounded_for_storage(level: str, is_low: bool) -> None:
    model = amp_graph.convert(Router(), policy=Policy("bfloat16", level=level))
    model(X)
    (plan,) = amp_graph.plans(model)
    assert {name in plan.low for name in ("softmax", "topk")} == {is_low}


def test_warnings_of_ours_are_named_so() -> None:
    with pytest.warns(ConversionWarning, match="nothing of LayerNorm was converted"):
        amp_graph.convert(nn.LayerNorm(16))(X)
