"""What enters a graph for its parameters stands for the next call, wherever that changes nothing.

The reference is a graph that gets everything anew at each call.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from counting import DispatchCounter, in_backward
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from training import X

import amp_graph
from amp_graph import Policy
from amp_graph.training import entrances
from amp_graph.training.entrances import Entrance

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "no_other_scales")

POLICIES = {
    "scaled": Policy("bfloat16", loss_scale=amp_graph.LossScale(2.0**10)),
    "unscaled": Policy("bfloat16"),
}
by_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


class Net(nn.Module):
    """Parameters that enter in low precision, and ones that do in float32 where they are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)))


class Aliases(DispatchCounter):
    """Counts those that are made where the parameters enter."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def record(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        self.count += name == "detach" and not in_backward()


@contextmanager
def always_anew() -> Iterator[None]:
    """The reference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Entrance, "enter", lambda self, *args: (self.let_go(), ENTER(self, *args)))
        yield


ENTER = Entrance.enter


def made_in(call: Callable[[], Any]) -> int:
    with Aliases() as counter:
        call()
    return counter.count


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad for p in model.parameters()]
    return [g.clone() for g in found if g is not None]


def loss(model: nn.Module, x: Tensor = X) -> Tensor:
    return model(x).float().square().mean()


@by_policy
def test_only_the_first_of_many_steps_makes_them(policy: Policy) -> None:
    model = amp_graph.convert(Net(), policy=policy)
    optimizer = SGD(model.parameters(), lr=0.1)

    def step() -> None:
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    for entrance in entrances._all:
        entrance.let_go()
    assert made_in(step) > 0
    assert [made_in(step) for _ in range(3)] == [0, 0, 0]


@by_policy
def test_calls_before_one_backward_pass_make_them_once(policy: Policy) -> None:
    model = amp_graph.convert(Net(), policy=policy)

    def step() -> None:
        sum(loss(model, k * X) for k in range(5)).backward()
        model.zero_grad()

    loss(model).backward()
    assert made_in(step) > 0
    assert [made_in(step) for _ in range(3)] == [0, 0, 0]


def test_calls_whose_inputs_have_gradients_make_them_once() -> None:
    model = amp_graph.convert(Net(), policy=POLICIES["scaled"])

    def attack() -> None:
        x = X.clone().requires_grad_()
        torch.autograd.grad(loss(model, x), [x])

    loss(model).backward()
    first, *others = [made_in(attack) for _ in range(3)]
    assert max(others) < first


class Sums(Aliases):
    """Counts what casts gradients, or adds them up, in a backward pass."""

    def record(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        casts_or_adds = ("add", "add_", "copy_", "_foreach_copy_", "_foreach_add_", "_to_copy")
        self.count += name in casts_or_adds and in_backward()


@by_policy
def test_one_call_more_costs_the_same_however_many_parameters(policy: Policy) -> None:
    def of_a_call(layers: int) -> int:
        chain = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
        model = amp_graph.convert(chain, policy=policy)
        found = []
        for calls in (2, 3):
            total = sum(loss(model, k * X) for k in range(calls))
            with Sums() as counter:
                total.backward()
            found.append(counter.count)
            model.zero_grad()
        return found[1] - found[0]

    assert of_a_call(layers=2) == of_a_call(layers=6)


def two_calls_before_backward(model: nn.Module) -> None:
    (loss(model) + loss(model, -X) * 3).backward()


def many_calls_before_backward(model: nn.Module) -> None:
    sum(loss(model, k * X) for k in range(1, 2 * entrances.CALLS + 2)).backward()


def the_second_of_two_calls_alone(model: nn.Module) -> None:
    _, second = loss(model), loss(model, -X)
    second.backward()


def two_calls_one_by_one(model: nn.Module) -> None:
    for each in [loss(model), loss(model, -X), loss(model, 3 * X)]:
        each.backward()


def two_calls_kept_for_later(model: nn.Module) -> None:
    both = loss(model) + loss(model, -X)
    both.backward(retain_graph=True)
    (loss(model, 2 * X) + loss(model, 3 * X)).backward()
    both.backward()


def a_result_fed_back(model: nn.Module) -> None:
    loss(model, model(X)).backward()


def inside_of_a_checkpoint(model: nn.Module) -> None:
    for reentrant in (True, False):
        x = X.clone().requires_grad_()
        halves = checkpoint(lambda x: model(model(x)), x, use_reentrant=reentrant)
        (halves.square().mean() + loss(model, -X)).backward()


def one_gradient_of_two_calls(model: nn.Module) -> None:
    *_, last = model.parameters()
    (slope,) = torch.autograd.grad(loss(model) + loss(model, -X), [last])
    (slope.sum() * loss(model)).backward()


def second_derivatives_of_two_calls(model: nn.Module) -> None:
    both = loss(model) + loss(model, -X)
    slopes = torch.autograd.grad(both, [*model.parameters()], create_graph=True)
    (both + sum(slope.square().sum() for slope in slopes)).backward()


def a_call_that_comes_to_nothing(model: nn.Module) -> None:
    loss(model, 2 * X)
    loss(model).backward()


def a_graph_kept_for_later(model: nn.Module) -> None:
    first = loss(model)
    first.backward(retain_graph=True)
    loss(model, -X).backward()
    first.backward()


def second_derivatives(model: nn.Module) -> None:
    parameters = [*model.parameters()]
    slopes = torch.autograd.grad(loss(model), parameters, create_graph=True)
    (loss(model, -X) + sum(slope.square().sum() for slope in slopes)).backward()


def some_gradients_alone(model: nn.Module) -> None:
    first = next(model.parameters())
    loss(model).backward(inputs=[first])
    loss(model, -X).backward()


def frozen_and_back(model: nn.Module) -> None:
    for frozen in (True, False):
        next(model.parameters()).requires_grad_(not frozen)
        loss(model).backward()


def other_memory(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data * 0.5
    loss(model).backward()


def written_in_place(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(0.5)
    loss(model).backward()


def written_before_two_calls(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    (loss(model) + loss(model, -X)).backward()


def other_parameters(model: nn.Module) -> None:
    for module in model.children():
        for name, p in [*module.named_parameters(recurse=False)]:
            setattr(module, name, nn.Parameter(p.detach()))  # in the same memory
    loss(model).backward()


def with_hooks(model: nn.Module) -> None:
    handles = [p.register_hook(lambda g: 2 * g) for p in model.parameters()]
    loss(model).backward()
    for handle in handles:
        handle.remove()
    loss(model).backward()


def of_functional_calls(model: nn.Module) -> None:
    given = {name: (p * 0.5).detach().requires_grad_() for name, p in model.named_parameters()}
    torch.func.functional_call(model, given, (X,)).float().square().mean().backward()
    for p, its in zip(model.parameters(), given.values(), strict=True):
        p.grad = its.grad


USES = [
    *(two_calls_before_backward, a_call_that_comes_to_nothing, a_graph_kept_for_later),
    *(second_derivatives, some_gradients_alone, frozen_and_back, other_memory, written_in_place),
    *(other_parameters, with_hooks, of_functional_calls, the_second_of_two_calls_alone),
    *(two_calls_one_by_one, one_gradient_of_two_calls, written_before_two_calls),
]
ROUNDED = [  # float32 sums of more than two, in another order
    *(many_calls_before_backward, two_calls_kept_for_later, a_result_fed_back),
    *(inside_of_a_checkpoint, second_derivatives_of_two_calls),
]


@by_policy
@pytest.mark.parametrize("use", [*USES, *ROUNDED], ids=lambda use: use.__name__)
def test_gradients_are_those_of_entering_anew(
    policy: Policy, use: Callable[[nn.Module], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entrances, "CALLS", 4)
    torch.manual_seed(0)
    net = Net()
    found = []
    for reference in (True, False):
        model = amp_graph.convert(copy.deepcopy(net), policy=policy)

        def course(model: nn.Module = model) -> list[list[Tensor]]:
            seen = []
            for around in (loss, use, loss, use):
                if around is loss:
                    loss(model).backward()
                else:
                    around(model)
                seen.append(gradients(model))
                model.zero_grad()
            return seen

        if reference:
            with always_anew():
                found.append(course())
        else:
            found.append(course())
    tolerance = 1e-6 if use in ROUNDED else 0.0
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(4, 8), nn.ModuleList([Net(), Net()])

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.body(x).relu()[:, :4]
        return [head(x) for head in self.heads]


@by_policy
@pytest.mark.parametrize("used", [[(0,), (0, 1)], [(0, 1), (0,)], [(0,), (1,)], [(0,), (0,)]])
def test_what_has_no_gradient_in_one_of_two_calls_gets_that_of_the_other(
    policy: Policy, used: list[tuple[int, ...]]
) -> None:
    torch.manual_seed(0)
    net = TwoHeads()
    found = []
    for around in (always_anew, nullcontext):
        model = amp_graph.convert(copy.deepcopy(net), policy=policy)
        with around():
            results = [model(k * X) for k in (1, 2)]
            chosen = [given[i] for given, its in zip(results, used, strict=True) for i in its]
            sum(result.square().mean() for result in chosen).backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(*found, rtol=0, atol=0)
    has_none = [name for name, gradient in found[1].items() if gradient is None]
    assert bool(has_none) == (used == [(0,), (0,)])


def test_gradients_of_two_calls_meet_in_float32() -> None:
    torch.manual_seed(0)
    model = amp_graph.convert(Net(), policy=Policy("bfloat16"))
    loss(model).backward()
    model.zero_grad()
    (loss(model) + loss(model, -X)).backward()
    together = gradients(model)
    model.zero_grad()
    loss(model).backward()
    loss(model, -X).backward()
    torch.testing.assert_close(together, gradients(model), rtol=0, atol=0)


@by_policy
def test_several_threads_get_their_own(policy: Policy) -> None:
    torch.manual_seed(0)
    model = amp_graph.convert(Net(), policy=policy)
    inputs = [X * k for k in range(1, 5)]
    parameters = [*model.parameters()]

    def of(x: Tensor) -> list[Tensor]:
        return [*torch.autograd.grad(loss(model, x), parameters)]

    expected = [of(x) for x in inputs]
    found: list[Any] = [None] * len(inputs)

    def work(k: int) -> None:
        for _ in range(20):
            found[k] = of(inputs[k])

    threads = [threading.Thread(target=work, args=[k]) for k in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@by_policy
def test_a_model_that_is_gone_leaves_nothing(policy: Policy) -> None:
    model = amp_graph.convert(Net(), policy=policy)
    loss(model).backward()
    loss(model).backward()
    gone = [weakref.ref(p) for p in model.parameters()]
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


def stands() -> bool:
    """Whether anything does."""
    found = [entrance._standing for entrance in entrances._all]
    return any(standing._entered for standing in found if standing is not None)


def test_another_stream_lets_go_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """With streams that the CPU does not have."""
    model = amp_graph.convert(Net(), policy=Policy("bfloat16"))
    loss(model).backward()
    assert stands()
    streams = {"now": frozenset("a")}
    monkeypatch.setattr(entrances, "current_streams", lambda devices: streams["now"])
    monkeypatch.setattr(entrances, "_streams", {})
    device = torch.device("cpu")
    entrances.follow_streams([device])
    assert not stands()
    loss(model).backward()
    entrances.follow_streams([device])
    assert stands()
    streams["now"] = frozenset("b")
    entrances.follow_streams([device])
    assert not stands()
