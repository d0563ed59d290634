"""What the tests with several threads share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import FLOAT16, distance
from training import X as BATCH

import amp_graph
from amp_graph.boundary.outer import Boundary, Interface
from amp_graph.weights.store import LowPrecisionWeights

X = torch.linspace(-1, 1, 32).reshape(4, 8)

SEVERAL_THREADS = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.skipif(
        torch.__version__ < "2.13" and not torch.cuda.is_available(),
        reason="torch 2.11 dies where several threads have set up its stand-in for CUDA",
    ),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def at_once(count: int, call: Callable[[int], Any]) -> list[Any]:
    """What threads get that begin together; of each the result, or what it raised."""
    begin, results = threading.Barrier(count), [None] * count

    def work(k: int) -> None:
        begin.wait()
        try:
            results[k] = call(k)
        except Exception as error:
            results[k] = error

    threads = [threading.Thread(target=work, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def evaluated(kind: type[nn.Module], is_warm: bool = False) -> nn.Module:
    """For evaluation; if warm, called in training before."""
    model = amp_graph.convert(kind(), policy="bfloat16")
    if is_warm:
        model(X)
    return model.eval()


def beside_it(model: nn.Module) -> Tensor:
    """What another thread gets now."""
    (result,) = at_once(1, lambda k: torch.no_grad()(model)(X))
    return result


def computing_with(store: LowPrecisionWeights) -> Callable[[Tensor], Tensor]:
    """A graph that returns the low-precision weight for its input, unrecorded."""
    interface = Interface(weights=[(0, torch.bfloat16)])
    graph = Boundary(lambda parameter, low: [low], interface, store, None)
    return lambda parameter: torch.no_grad()(graph)(parameter)[0]


def gone_wrong_beside_one_another(plain: nn.Module, model: nn.Module) -> list[float]:
    """Of two threads that take small and large gradients of an `Mlp` at once, the sizes of those
    that are not the plain one's."""
    wrong: list[float] = []

    def beside(k: int) -> None:
        size = (1e-3, 1e3)[k]
        (expected,) = torch.autograd.grad((plain(BATCH) * size).sum(), [plain.second.weight])
        for _ in range(50):
            (found,) = torch.autograd.grad((model(BATCH) * size).sum(), [model.second.weight])
            wrong.extend([size] if distance(found, expected) > FLOAT16 else [])

    raised = [error for error in at_once(2, beside) if error is not None]
    assert not raised, raised
    return wrong
