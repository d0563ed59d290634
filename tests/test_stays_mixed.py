"""No silent way back to float32: what could undo a conversion does not, or says so."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from nets import Net, low_share
from torch import nn

import amp_graph
from amp_graph.capture.budget import MAX_CAPTURES

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_deep_copy_is_converted_and_apart() -> None:
    model, x = amp_graph.convert(Net()), torch.randn(4, 8)
    model(x)
    twin = copy.deepcopy(model)
    assert amp_graph.is_converted(twin)
    assert low_share(twin, x) == 1
    with torch.no_grad():
        twin.second.weight.zero_()
        twin.second.bias.zero_()
    assert twin(x).abs().max() == 0 and model(x).abs().max() > 0
    wrapper = copy.deepcopy(nn.ModuleDict({"inner": model}))
    assert amp_graph.is_converted(wrapper["inner"]) and low_share(wrapper["inner"], x) == 1


def test_twenty_shapes_in_a_row_stay_mixed() -> None:
    model = amp_graph.convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)))
    for size in range(20):
        assert low_share(model, torch.randn(1 + size % 3, 3, 8 + size, 9 + 2 * size)) == 1


def test_twenty_sequence_lengths_stay_mixed() -> None:
    model = amp_graph.convert(nn.LSTM(4, 4))
    for length in range(2, 22):
        assert low_share(model, torch.randn(length, 2, 4)) == 1


def test_many_constant_arguments_stay_mixed() -> None:
    model = amp_graph.convert(Net())
    for i in range(20):
        assert low_share(model, torch.randn(4, 8), scale=1.0 + i / 7) == 1


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        print(end="")
        if hidden.sum() > 1e9:
            hidden = hidden * 2
        return self.second(hidden)


def test_graph_breaks_and_data_dependent_branches_stay_mixed() -> None:
    model, x = amp_graph.convert(Breaking()), torch.randn(4, 8)
    assert low_share(model, x) == 1
    assert len(amp_graph.plans(model)) > 1


class Calls(nn.Module):
    """Something else, between its two layers."""

    def __init__(self, other: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other = other

    @torch.compiler.disable
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self.first(x)))


class Remembering(nn.Module):
    """Captured anew at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(8, 8), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(self.seen))
        return self.layer(x)


def compiled_anew(x: torch.Tensor) -> torch.Tensor:
    def more(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    more.__code__ = more.__code__.replace()  # that Dynamo has not seen
    return torch.compile(more, backend="eager")(x)


def in_another_thread(x: torch.Tensor) -> torch.Tensor:
    thread = threading.Thread(target=compiled_anew, args=(x.detach(),))
    thread.start()
    thread.join()
    return x


@pytest.mark.filterwarnings("ignore:Remembering is no longer captured")
@pytest.mark.parametrize("kind", ["another thread", "a compiled function", "a converted model"])
def test_captures_that_are_not_its_own_cost_a_model_nothing(kind: str) -> None:
    inner = amp_graph.convert(Remembering(), policy="float16")
    others = {"another thread": in_another_thread, "a compiled function": compiled_anew}
    model, x = Calls(others.get(kind, inner)), torch.randn(4, 8)
    amp_graph.convert(model, policy="float16")
    model(x)
    expected = amp_graph.plans(model)
    for _ in range(MAX_CAPTURES + 2):
        model(x)
    assert amp_graph.plans(model) == expected
    assert all(plan.low and plan.dtype is torch.float16 for plan in expected)
    assert len(expected) == 2


class Slices(Breaking):
    """Indices with gaps, None in the operator's list."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        chosen = torch.zeros_like(hidden)
        chosen[:, torch.tensor([0, 2])] = hidden[:, :2]
        chosen[:, torch.tensor([1, 3])] += hidden[:, 2:4]
        return self.second(chosen)


class Combines(Breaking):
    """A size that depends on data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.combinations(self.first(x)[0], 2)
        return self.second(pairs.reshape(-1, 8))


@pytest.mark.filterwarnings("error::amp_graph.ConversionWarning")
@pytest.mark.parametrize("make", [Slices, Combines])
def test_indices_and_sizes_do_not_keep_a_graph_in_float32(make: type[Breaking]) -> None:
    plain, x = make(), torch.randn(8, 8)
    model = amp_graph.convert(copy.deepcopy(plain))
    assert low_share(model, x) == 1
    assert not any(plan.otherwise for plan in amp_graph.plans(model))
    torch.testing.assert_close(model(x), plain(x), atol=0.05, rtol=0.05)


def test_outer_compile_keeps_the_conversion() -> None:
    model, x = amp_graph.convert(Net()), torch.randn(4, 8)
    outer = torch.compile(model, backend="eager")
    assert low_share(outer, x) == 1

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x) + 1

    assert low_share(step, x) == 1


def test_autocast_around_a_converted_model_changes_nothing() -> None:
    model, x = amp_graph.convert(Net().eval()), torch.randn(4, 8)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), expected)
    fresh = amp_graph.convert(copy.deepcopy(amp_graph.restore(model)))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fresh(x), expected)
    assert len(amp_graph.plans(fresh)) == 1


def test_a_dispatch_mode_does_not_undo_the_conversion() -> None:
    model, x = amp_graph.convert(Net()), torch.randn(4, 8)

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    with Mode():
        model(x)
    assert low_share(model, x) == 1


def test_functorch_transforms_run_and_do_not_undo_the_conversion() -> None:
    model, x = amp_graph.convert(nn.Linear(8, 4)), torch.randn(3, 2, 8)
    model(x)
    mapped = torch.func.vmap(model)(x)
    torch.testing.assert_close(mapped, model(x), rtol=2e-2, atol=2e-2)
    assert low_share(model, x) == 1


def test_an_error_of_the_model_comes_through_unchanged() -> None:
    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x)
            if x.shape[0] == 3:
                raise KeyError("no batch of three")
            return x

    model = amp_graph.convert(Raises())
    with pytest.raises(KeyError, match="no batch of three"):
        model(torch.randn(3, 2))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(2, 5))
    assert low_share(model, torch.randn(2, 2)) == 1


class Packed(nn.Module):
    """A recurrent layer on packed sequences, which Dynamo leaves to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        hidden, _ = self.layer(packed)
        return self.head(nn.utils.rnn.pad_packed_sequence(hidden, batch_first=True)[0])


def test_code_between_graphs_runs_under_autocast_and_is_named() -> None:
    plain = Packed()
    model = amp_graph.convert(copy.deepcopy(plain))
    x, lengths = torch.randn(3, 5, 8), torch.tensor([5, 3, 2])
    model(x, lengths)
    assert model.calls == 1  # no part of it ran twice
    assert any("code between graphs" in (p.fallback or "") for p in amp_graph.plans(model))
    assert low_share(model, x, lengths) == 1
    result = model(x, lengths)
    assert result.dtype is torch.float32
    torch.testing.assert_close(result, plain(x, lengths), rtol=5e-2, atol=2e-2)


def test_a_traced_graph_module_is_copied_with_its_conversion() -> None:
    model = amp_graph.convert(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU())))
    twin = copy.deepcopy(model)
    assert amp_graph.is_converted(twin)
    assert low_share(twin, torch.randn(4, 8)) == 1


@pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning")
def test_a_nested_tensor_is_left_to_autocast() -> None:
    """Its sizes are no numbers that a graph could be rewritten for."""
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    x = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(x)
    result = model(x)
    assert result.is_nested and result.dtype is torch.float32
    assert torch.equal(result.values(), expected.values().float())
    (plan,) = amp_graph.plans(model)
    assert plan.autocast and "nested" in (plan.fallback or "")
