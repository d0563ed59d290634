"""Recurrent layers: captured as one operator, for every length."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import amp_graph
from amp_graph.dynamo_changes.recurrent_layers import KEY, recurrent_layers_whole
from amp_graph.graphs.aten import RECURRENT
from amp_graph.graphs.cells import CELLS
from amp_graph.override import Override
from amp_graph.policy import Policy

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

PYTORCHS = {layer: layer.py_kernels[KEY] for layer in RECURRENT}
KINDS: dict[str, Any] = {
    "lstm": nn.LSTM,
    "projected lstm": lambda *args, **kwargs: nn.LSTM(*args, proj_size=3, **kwargs),
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *args, **kwargs: nn.RNN(*args, nonlinearity="relu", **kwargs),
}
BOTH = (False, True)


def described(tree: Any) -> list[tuple[Any, ...]]:
    return [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in tree_leaves(tree)]


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_are_those_of_the_layers(kind: str) -> None:
    for layers, bidirectional, batch_first, bias, grad in itertools.product((1, 2), *[BOTH] * 4):
        how = {"bidirectional": bidirectional, "batch_first": batch_first, "bias": bias}
        layer = KINDS[kind](4, 5, layers, **how)
        x = torch.randn(2, 7, 4)
        with torch.set_grad_enabled(grad):
            real = layer(x)
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            with mode, enable_python_dispatcher(), recurrent_layers_whole():
                told = layer(mode.from_tensor(x))
        assert described(told) == described(real)


class Tagger(nn.Module):
    """Labels each step of a sequence."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = KINDS[kind](4, 8, 2, batch_first=True)
        self.head = nn.Linear(3 if kind == "projected lstm" else 8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0])


def pair(kind: str, **policy: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain, model = Tagger(kind), Tagger(kind)
    model.load_state_dict(plain.state_dict())
    return plain, amp_graph.convert(model, policy=Policy("bfloat16", **policy))


def compare(plain: nn.Module, model: nn.Module, length: int, tolerance: float) -> None:
    x = torch.randn(2, length, 4)
    results = [m(x) for m in (plain, model)]
    for m, result in zip((plain, model), results, strict=True):
        m.zero_grad()
        result.square().sum().backward()
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=tolerance)
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= 10 * tolerance * a.grad.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_all_lengths_share_a_graph(kind: str) -> None:
    plain, model = pair(kind)
    for length in (5, 9, 12, 30, 2):
        compare(plain, model, length, tolerance=1e-2)
    plans = amp_graph.plans(model)
    assert len(plans) == 2  # the second has lengths as symbols
    for plan in plans:
        (layer,) = (f.name for f in plan.facts.values() if f.op in map(str, RECURRENT))
        assert layer in plan.low
    assert all(layer.py_kernels[KEY] is PYTORCHS[layer] for layer in RECURRENT)


def test_a_layer_kept_in_float32_is_exact() -> None:
    plain, model = pair("gru", overrides=(Override("deny", op="aten.gru"),), keep_float32=("head",))
    compare(plain, model, 6, tolerance=1e-6)


class Started(nn.Module):
    """Begins with a state that code between graphs, under autocast, left in low precision."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.layer = nn.Linear(4, 5), nn.GRU(4, 5, batch_first=True)

    @torch.compiler.disable
    def started(self, x: Tensor) -> Tensor:
        return self.start(x[:, 0])[None]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.started(x))[0]


def test_a_state_may_come_from_under_autocast() -> None:
    model, x = Started(), torch.randn(2, 7, 4)
    exact = model(x)
    amp_graph.convert(model, policy="bfloat16")
    for _ in range(2):  # code between graphs is under autocast from the second on
        found = model(x)
    assert torch.allclose(found, exact, atol=0.02)
    assert found.dtype is torch.float32
    assert not any("not captured (" in str(p.fallback) for p in amp_graph.plans(model))


class Loop(nn.Module):
    """One step after the other, of a cell that forgets little."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell = cell
        with torch.no_grad():
            cell.bias_ih[16:32].fill_(2.0)  # the gate between the old state and the new

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[1], 16)
        others, outputs = state, []
        for step in x:
            if isinstance(self.cell, nn.LSTMCell):
                state, others = self.cell(step, (state, others))
            else:
                state = self.cell(step, state)
            outputs.append(state)
        return torch.stack(outputs)


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell])
def test_the_state_of_a_cell_is_not_rounded_at_each_step(kind: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 4, 8)
    plain = Loop(kind(8, 16))
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    whole = plain(x)
    with torch.autocast("cpu", torch.bfloat16):
        of_autocast = plain(x)
    assert (model(x) - whole).norm() <= 1.1 * (of_autocast - whole).norm()


def remembering(**how: Any) -> nn.GRU:
    """A layer that forgets little of what it saw."""
    layer = nn.GRU(8, 16, **how)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith("bias_ih"):
                parameter[16:32].fill_(4.0)  # the gate between the old state and the new
    return layer


@pytest.mark.parametrize("how", [{}, {"num_layers": 2, "bidirectional": True}], ids=str)
def test_the_state_of_a_gru_is_not_rounded_at_each_step(how: Any) -> None:
    torch.manual_seed(0)
    x, plain = torch.randn(200, 4, 8), remembering(**how)
    found = results_and_gradients(amp_graph.convert(copy.deepcopy(plain), policy="bfloat16"), x)
    whole = results_and_gradients(plain, x)
    with torch.autocast("cpu", torch.bfloat16):
        of_autocast = results_and_gradients(plain, x)
    for one, other, exact in zip(found, of_autocast, whole, strict=True):
        assert (one - exact).norm() <= 1.25 * (other - exact).norm()


def results_and_gradients(layer: nn.Module, x: Tensor) -> list[Tensor]:
    results = layer(x)
    sum(r.sin().sum() for r in results).backward()
    gradients = [p.grad.flatten() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    return [*(r.detach() for r in results), torch.cat(gradients)]


@pytest.mark.parametrize("emulation", ["native", "float32"])
def test_compare_sees_the_state_of_a_gru_as_it_is(emulation: str) -> None:
    torch.manual_seed(0)
    x, plain = torch.randn(200, 4, 8), remembering()
    policy = Policy(dtype=torch.bfloat16, emulation=emulation)
    report = amp_graph.compare(plain, x, policy=policy, loss=lambda out: out[0].sin().sum())
    model = amp_graph.convert(copy.deepcopy(plain), policy=policy)
    with torch.no_grad():
        exact, found = (torch.cat([r.flatten() for r in run(x)]) for run in (plain, model))
    assert report.outputs == pytest.approx(float((found - exact).norm() / exact.norm()), rel=1e-3)


@pytest.mark.parametrize("bias", BOTH)
@pytest.mark.parametrize("cell", CELLS)
def test_the_parts_of_a_cell_are_the_cell(cell: Any, bias: bool) -> None:
    is_lstm = cell is torch.ops.aten.lstm_cell.default
    rows = 16 if is_lstm else 12
    x, hidden, state = torch.randn(2, 3), torch.randn(2, 4), torch.randn(2, 4)
    weights = [torch.randn(rows, 3), torch.randn(rows, 4)]
    weights += [torch.randn(rows), torch.randn(rows)] if bias else []
    given = (x, (hidden, state) if is_lstm else hidden, *weights)
    torch.testing.assert_close(CELLS[cell](*given), cell(*given), rtol=0, atol=0)
