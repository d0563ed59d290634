"""A fault of this package never breaks a run: the user's own graph runs, and a warning says so."""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from typing import Any

import pytest
import torch
import zoo
from counting import MatmulCounter
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_graph
from amp_graph import ConversionWarning

X = torch.randn(4, 8)
STAGES = ["annotate", "flow_graph", "paint", "place_casts", "emit", "verify"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.second(self.norm(self.first(x)).relu())


@pytest.fixture
def pair() -> tuple[nn.Module, nn.Module]:
    """Two models with the same weights, the second one converted."""
    torch._dynamo.reset()
    plain, converted = Net(), Net()
    converted.load_state_dict(plain.state_dict())
    return plain, amp_graph.convert(converted)


def assert_same_run(plain: nn.Module, converted: nn.Module, calls: int = 2) -> None:
    """Results, parameters, gradients and buffers are those of the plain model, call after call."""
    for call in range(calls):
        torch.manual_seed(call)
        expected, drawn = plain(X), torch.rand(1)
        torch.manual_seed(call)
        result = converted(X)
        assert torch.equal(torch.rand(1), drawn)
        torch.testing.assert_close(result, expected)
        plain.zero_grad()
        converted.zero_grad()
        expected.square().sum().backward()
        result.square().sum().backward()
    for (name, p), q in zip(plain.named_parameters(), converted.parameters(), strict=True):
        torch.testing.assert_close((q, q.grad), (p, p.grad), msg=name)
    for (name, a), b in zip(plain.named_buffers(), converted.buffers(), strict=True):
        torch.testing.assert_close(b, a, msg=name)


@pytest.mark.filterwarnings("ignore:nothing of Net")
@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_in_a_stage(stage: str, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError(f"planted in {stage}")

    monkeypatch.setattr(sys.modules["amp_graph.backend.rewrite"], stage, broken)
    with pytest.warns(ConversionWarning, match=f"graph 0 of Net runs as it was captured.*{stage}"):
        assert_same_run(*pair)
    (plan,) = amp_graph.plans(pair[1])
    assert plan.fallback == f"ZeroDivisionError: planted in {stage}"
    assert not plan.low and not plan.casts


def test_a_graph_that_cannot_be_retraced_runs_under_autocast(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("planted in retrace")

    monkeypatch.setattr(sys.modules["amp_graph.backend.decide"], "retrace", broken)
    _, converted = pair
    with MatmulCounter() as counter, pytest.warns(ConversionWarning) as warned:
        assert converted(X).dtype is torch.float32
        line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    assert {(w.filename, w.lineno) for w in warned} == {(__file__, line)}
    assert counter.low_share == 1
    (plan,) = amp_graph.plans(converted)
    assert plan.autocast and "planted in retrace" in str(plan.fallback)


def test_a_failed_retrace_leaves_no_mode_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                return self.layer(x)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("planted in make_fx")

    torch._dynamo.reset()
    monkeypatch.setattr(sys.modules["amp_graph.capture.retrace"], "make_fx", broken)
    model = amp_graph.convert(Region())
    model(X)
    assert "planted in make_fx" in (amp_graph.plans(model)[0].fallback or "")
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.filterwarnings("error::amp_graph.ConversionWarning")
@pytest.mark.parametrize("name", ["custom_function", "checkpointed"])
def test_a_body_that_cannot_be_retraced_does_not_keep_the_rest_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()

    def fail(*_: Any) -> Any:
        raise ValueError("planted")

    monkeypatch.setattr(sys.modules["amp_graph.capture.retrace"], "retrace", fail)
    case = next(c for c in zoo.cases() if c.name == name)
    args, kwargs = case.batch(0, 0)
    model = amp_graph.convert(case.make())
    model(*args, **kwargs)
    (plan,) = amp_graph.plans(model)
    assert "linear" in plan.low
    assert {body.fallback for body in plan.bodies.values()} == {
        "not retraced to ATen (ValueError: planted)"
    }


class Dropping(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x))


@pytest.mark.filterwarnings("ignore:nothing of")
class Averaging(Net):
    """Its first layer follows another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.leader = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first.weight.data = self.first.weight.data * 0.5 + self.leader.weight.data * 0.5
        return super().forward(x)


class Checkpointing(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(checkpoint(self.inner, x, use_reentrant=False))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + x @ x.mT @ x


@pytest.mark.parametrize("make", [Net, Dropping, Averaging, Checkpointing])
def test_an_emitted_graph_that_does_not_run(
    make: type[Net], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers written and random numbers drawn before the failure are as one run of the original
    leaves them."""
    torch._dynamo.reset()
    plain = make()
    converted = amp_graph.convert(copy.deepcopy(plain))
    rewrite_module = sys.modules["amp_graph.backend.rewrite"]
    emit = rewrite_module.emit

    def emit_broken(*args: Any) -> Any:
        emitted = emit(*args)
        graph = emitted.module.graph
        with graph.inserting_before(graph.output_node()):
            graph.call_function(_fail)
        emitted.module.recompile()
        return emitted

    monkeypatch.setattr(rewrite_module, "emit", emit_broken)
    monkeypatch.setattr(rewrite_module, "verify", lambda *args: None)
    with pytest.warns(ConversionWarning, match="planted in the emitted graph"):
        assert_same_run(plain, converted)
    assert not any(plan.converts for plan in amp_graph.plans(converted))


def _fail() -> None:
    raise NotImplementedError("planted in the emitted graph")


@pytest.fixture
def broken_capture(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Dynamo raises in the middle of whatever it captures, after the code before ran. The list is
    of what it was asked for."""
    from torch._dynamo.exc import InternalTorchDynamoError

    asked: list[str] = []

    def broken(*args: Any, **kwargs: Any) -> Any:
        asked.append("call")
        torch.mm(X, X.t())
        raise InternalTorchDynamoError("planted in Dynamo")

    monkeypatch.setattr("amp_graph.capture.captures.Caller.__call__", broken)
    return asked


def test_a_model_dynamo_cannot_capture_runs_under_autocast(broken_capture: list[str]) -> None:
    converted = amp_graph.convert(Net())
    with pytest.warns(ConversionWarning, match="runs under autocast: not captured .planted in Dyn"):
        converted(X)
    with MatmulCounter() as counter:
        converted(X)
    assert counter.low_share == 1


def test_what_cannot_be_captured_is_tried_twice_and_not_again(broken_capture: list[str]) -> None:
    """The second time with breaks at what depends on data."""
    converted = amp_graph.convert(Net())
    with pytest.warns(ConversionWarning, match="planted in Dynamo"):
        converted(X)
    assert len(broken_capture) == 2 and converted.calls == 1
    (plan,) = amp_graph.plans(converted)
    with warnings.catch_warnings(action="error"):
        converted(X)
    assert amp_graph.plans(converted) == (plan,) and len(broken_capture) == 2


def test_the_recompile_limit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    settings = sys.modules["amp_graph.capture.dynamo"].SETTINGS
    monkeypatch.setitem(settings, "recompile_limit", 2)

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
            return self.layer(x) * len(name)

    model = amp_graph.convert(Named())
    with pytest.warns(ConversionWarning, match="runs under autocast"):
        for i in range(4):
            model(X, name="n" * i)
    with MatmulCounter() as counter:
        model(X, name="another")
    assert counter.low_share == 1
