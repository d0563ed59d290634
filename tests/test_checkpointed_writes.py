"""What the body of a checkpoint writes to what the call has made stays in the graph."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import assert_same_gradients, twins
from two_layers import BFLOAT16, POLICIES, Two, X

import amp_graph
from amp_graph import Policy
from amp_graph.convert import record_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Listed(Two):
    """A value from inside is in the loss."""

    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        inside: list[Tensor] = []

        def block(x: Tensor) -> Tensor:
            h = self.a(x)
            inside.append(h)
            return self.b(h.tanh())

        for _ in range(2):
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x + inside[0].square() + inside[1]


class InReentrant(Listed):
    use_reentrant = True


class Rebound(Two):
    """A variable of the function around is."""

    def forward(self, x: Tensor) -> Tensor:
        penalty: Tensor | None = None

        def block(x: Tensor) -> Tensor:
            nonlocal penalty
            penalty = self.a(x)
            return self.b(penalty.tanh())

        return checkpoint(block, x, use_reentrant=False) + penalty


class Collected(Two):
    """By a hook that the first call adds, behind a lock, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[Tensor] | None = None
        self.is_ready = False

    def add(self, module: nn.Module, args: Any, result: Tensor) -> None:
        if self.collected is not None:
            self.collected.append(result)

    def prepare(self) -> None:
        if not self.is_ready:
            with lock:
                self.a.register_forward_hook(self.add)
                self.is_ready = True

    def forward(self, x: Tensor) -> Tensor:
        collected: list[Tensor] = []
        self.prepare()
        self.collected = collected
        for _ in range(2):
            x = checkpoint(lambda x: self.b(self.a(x).tanh()), x, use_reentrant=False)
        self.collected = None
        return x + collected[0].square() + collected[1]


lock = threading.Lock()


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("kind", [Listed, Rebound])
def test_it_does_not_end_the_graph(kind: type[nn.Module], policy: Policy) -> None:
    plain, model = twins(kind(), policy)
    train_both(plain, model)
    (plan,) = amp_graph.plans(model)
    assert not record_of(model).breaks and not plan.fallback
    assert all(body.low for body in plan.bodies.values()) and plan.bodies


def test_what_a_reentrant_one_writes_has_no_gradient() -> None:
    plain, model = twins(InReentrant(), Policy("bfloat16"))
    train_both(plain, model)


@pytest.mark.filterwarnings("error")
def test_a_first_call_that_adds_hooks_tells_nothing_of_the_next() -> None:
    plain, model = twins(Collected(), Policy("bfloat16"))
    for _ in range(3):
        train_both(plain, model)
    *_, plan = amp_graph.plans(model)
    assert not any(p.otherwise for p in amp_graph.plans(model))
    assert len(plan.bodies) == 2 and all(body.low for body in plan.bodies.values())


class Counted(Two):
    """Counts as often as its layers are computed, in the backward pass as well."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            self.count += 1
            return self.b(self.a(x).tanh())

        return checkpoint(block, x, use_reentrant=False)


def test_what_was_there_before_is_written_as_often_as_in_the_plain_model() -> None:
    plain, model = twins(Counted(), Policy("bfloat16"))
    for _ in range(3):
        train_both(plain, model)
    assert model.count == plain.count


def train_both(plain: nn.Module, model: nn.Module) -> None:
    for each in (plain, model):
        each.zero_grad()
        each(X.clone().requires_grad_()).square().mean().backward()
    assert_same_gradients(model, plain, BFLOAT16)
