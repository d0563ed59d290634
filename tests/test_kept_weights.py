"""Low-precision weights that are kept between calls (`refresh_weights="on_change"`).

They are made anew exactly when a parameter was seen to change: never stale but after what no trace
is left of, and no more often than needed.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from counting import COPIES, DispatchCounter
from hypothesis import given, settings
from hypothesis import strategies as st
from replaying import Recording
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from training import Mlp, X
from weight_changes import CHANGES, OTHER, SCALED, ByHand, ByHandTwice, assert_seen, by_data, now

import amp_graph
from amp_graph import Policy, PolicyError
from amp_graph.weights import change_tracker

KEPT = replace(SCALED, refresh_weights="on_change")
LEAVE_NO_TRACE = (".data in place", "numpy")
SEEN = {name: change for name, change in CHANGES.items() if name not in LEAVE_NO_TRACE}

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture(autouse=True)
def no_optimizer_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_tracker._steps, "_under_way", weakref.WeakKeyDictionary())
    monkeypatch.setattr(change_tracker._steps, "are_replayed", False)


class Refreshes(DispatchCounter):
    """Counts the calls that write low-precision weights."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def record(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name in COPIES and isinstance(args[0], (list, tuple)):
            self.count += args[0][0].dtype is torch.float16


def refreshes(run: Callable[[], object]) -> int:
    with Refreshes() as counter:
        run()
    return counter.count


@pytest.mark.parametrize("change", SEEN.values(), ids=SEEN.keys())
@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_is_made_anew_after_a_change(change: Callable[[nn.Module], Any], around: Any) -> None:
    assert_seen(amp_graph.convert(Mlp(), policy=KEPT), change, around)


@pytest.mark.parametrize("name", LEAVE_NO_TRACE)
def test_a_change_without_a_trace_can_be_told_of(name: str) -> None:
    model = amp_graph.convert(Mlp(), policy=KEPT)
    with torch.no_grad():
        model(X)
        CHANGES[name](model)
        increment_version(model.parameters())
        assert torch.equal(model(X), now(model))


def test_one_refresh_for_all_micro_batches_of_a_step() -> None:
    model = amp_graph.convert(Mlp(), policy=KEPT)
    optimizer = AdamW(model.parameters(), fused=True)
    model(X)

    def step() -> None:
        for _ in range(4):
            model(X).square().mean().backward()
        optimizer.step()

    step()
    assert [refreshes(step) for _ in range(2)] == [1, 1]


def test_no_refresh_in_inference() -> None:
    model = amp_graph.convert(Mlp(), policy=KEPT).eval()
    with torch.inference_mode():
        model(X)
        assert refreshes(lambda: [model(X) for _ in range(3)]) == 0
    assert refreshes(lambda: amp_graph.convert(Mlp(), policy=SCALED)(X)) > 0  # so it can be seen


def test_memory_let_go_and_taken_again() -> None:
    """Another tensor at the address of one that is no more."""
    model = amp_graph.convert(Mlp(), policy=KEPT)
    addresses = [bytearray(p.nbytes) for p in model.parameters()]
    with torch.no_grad():
        for _ in range(3):
            for p, address in zip(model.parameters(), addresses, strict=True):
                p.data = torch.rand_like(p)  # lets go of what was at the address
                again = torch.frombuffer(address, dtype=torch.float32)
                p.data = again.copy_(torch.rand_like(again)).view_as(p)
            assert torch.equal(model(X), now(model))


def test_memory_swapped_in_and_out() -> None:
    model = amp_graph.convert(Mlp(), policy=KEPT)
    live = [p.data for p in model.parameters()]
    averages = [p.data * 0.5 for p in model.parameters()]
    with torch.no_grad():
        for values in (averages, live, averages):
            model(X)
            for p, value in zip(model.parameters(), values, strict=True):
                p.data = value
            assert torch.equal(model(X), now(model))


def test_memory_swapped_for_evaluation_alone() -> None:
    """The graph for training does not see what the one for evaluation saw."""
    model = amp_graph.convert(Mlp(), policy=KEPT)
    live = [p.data for p in model.parameters()]
    averages = [p.data * 0.5 for p in model.parameters()]
    for _ in range(2):
        for values, grad in ((live, True), (averages, False)):
            for p, value in zip(model.parameters(), values, strict=True):
                p.data = value
            with torch.set_grad_enabled(grad):
                assert torch.equal(model(X), now(model))


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "by hand": ByHand,
    "by hand, twice": ByHandTwice,
    "LBFGS": lambda p: LBFGS(p, lr=0.1, max_iter=4),
    "SGD fused": lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW foreach": lambda p: AdamW(p, lr=0.1, foreach=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_trains_as_with_weights_made_anew_at_each_call(make: Callable[[Any], Optimizer]) -> None:
    plain = Mlp()

    def trained(policy: Policy) -> list[Tensor]:
        model = amp_graph.convert(copy.deepcopy(plain), policy=policy)
        optimizer = make(model.parameters())

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(X).square().mean()
            loss.backward()
            return loss

        results = []
        for _ in range(4):
            optimizer.step(closure)
            results.append(model(X).detach())
        return [*results, *model.parameters()]

    assert all(map(torch.equal, trained(KEPT), trained(SCALED)))


def test_first_called_in_the_middle_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_tracker, "_steps", change_tracker._Steps())
    model = amp_graph.convert(Mlp(), policy=KEPT)
    found = []

    def closure() -> None:
        result = model(X)
        result.square().mean().backward()
        found.append((result, now(model)))

    ByHand(model.parameters()).step(closure)
    assert len(found) == 2
    assert all(torch.equal(*pair) for pair in found)
    assert refreshes(lambda: [model(X) for _ in range(3)]) == 1  # the step is over


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_step_that_raises_half_way(is_gone: bool) -> None:
    class Fails(ByHand):
        def step(self, closure: Any = None) -> Any:
            by_data(model)
            raise RuntimeError("half way")

    model = amp_graph.convert(Mlp(), policy=KEPT)
    optimizers = [Fails(model.parameters()) for _ in range(2)]
    with torch.no_grad():
        for _ in range(2):
            model(X)
            with pytest.raises(RuntimeError, match="half way"):
                optimizers[-1].step()
            if is_gone:
                optimizers.pop()
                gc.collect()  # of the traceback, too
            assert torch.equal(model(X), now(model))


PROGRAM = st.lists(
    st.sampled_from(["train", "look", "step", "load", "halve", "replace", "swap", "freeze"]),
    max_size=12,
)


@given(PROGRAM)
@settings(max_examples=30, deadline=None)
def test_any_course_of_training_is_the_same(program: list[str]) -> None:
    plain = Mlp()
    always, kept = Course(plain, SCALED), Course(plain, KEPT)
    for what in program:
        found, expected = kept.do(what), always.do(what)
        assert torch.equal(found, expected), program


class Course:
    def __init__(self, plain: nn.Module, policy: Policy):
        self.model = amp_graph.convert(copy.deepcopy(plain), policy=policy)
        self.optimizer = SGD(self.model.parameters(), lr=0.1, fused=True)
        self.others = [p.detach() * 0.5 for p in self.model.parameters()]

    def do(self, what: str) -> Tensor:
        model = self.model
        with torch.no_grad():
            if what == "look":
                return model(X)
            if what == "swap":
                for p, other in zip(model.parameters(), self.others, strict=True):
                    p.data, other.data = other.data, p.data
            if what == "load":
                model.load_state_dict(OTHER)
            for p in model.parameters():
                if what == "halve":
                    p.mul_(0.5)
                elif what == "replace":
                    p.data = p.data + 0.25
        if what == "freeze":
            model.first.requires_grad_(not model.first.weight.requires_grad)
        elif what == "step":
            self.optimizer.step()
        elif what == "train":
            model(X).square().mean().backward()
        return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_replays_compute_with_the_weights_of_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays change parameters without Python; so a captured call refreshes, and all do after."""
    model = amp_graph.convert(Mlp(), policy=KEPT)
    with torch.no_grad():
        model(X)
        with monkeypatch.context() as patch, Recording() as recording:
            patch.setattr(change_tracker, "is_captured", lambda device: True)
            captured = model(X)
        by_data(model)
        recording.replay()
        assert torch.equal(captured, now(model))
        by_data(model)
        assert torch.equal(model(X), now(model))


def test_a_copy_keeps_weights_of_its_own() -> None:
    model = amp_graph.convert(Mlp(), policy=KEPT)
    with torch.no_grad():
        before = model(X)
        other = copy.deepcopy(model)
        other.load_state_dict(OTHER)
        assert torch.equal(other(X), now(other))
        assert torch.equal(model(X), before)
        assert refreshes(lambda: (model(X), other(X))) == 0


def test_a_word_that_is_not_known() -> None:
    with pytest.raises(PolicyError, match="refresh_weights must be 'always' or 'on_change'"):
        Policy(refresh_weights="never")
