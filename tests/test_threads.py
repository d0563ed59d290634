"""One process, several threads: a server that goes on while a model is loaded."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from two_layers import Two, X

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Relu(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


def in_a_thread(model: nn.Module) -> Tensor:
    found: list[Tensor] = []

    @torch.no_grad()
    def call() -> None:
        found.append(model(X))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return found[0]


@torch.no_grad()
def test_a_model_runs_as_ever_while_another_thread_captures() -> None:
    served, results = amp_graph.convert(Relu(), policy="bfloat16"), []
    expected = served(X)

    @torch.library.custom_op("amp_graph_tests::beside", mutates_args=())
    def beside(x: Tensor) -> Tensor:
        return x.clone()

    @beside.register_fake
    def _(x: Tensor) -> Tensor:
        results.append(in_a_thread(served))
        return torch.empty_like(x)

    class Loaded(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(beside(self.a(x)))

    amp_graph.convert(Loaded(), policy="bfloat16")(X)
    assert results and all(torch.equal(result, expected) for result in results)
    assert len(amp_graph.plans(served)) == 1


@torch.no_grad()
def test_a_tracer_gets_the_code_of_its_own_thread() -> None:
    """`make_fx` has the model's own code, in its own precision."""
    exact = Relu()(X)
    model, others = amp_graph.convert(Relu(), policy="bfloat16"), []
    expected = model(X)

    def traced(x: Tensor) -> Tensor:
        others.append(in_a_thread(model))
        return model(x)

    program = make_fx(traced)(X)
    assert torch.equal(program(X), exact)
    assert torch.equal(others[0], expected) and not torch.equal(exact, expected)
