"""A model, and what it is compared with: one whose graphs get everything anew at each call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from counting import DispatchCounter, in_backward
from torch import Tensor, nn
from training import X

import amp_graph
from amp_graph import Policy
from amp_graph.boundary.entrances import Entrance
from amp_graph.boundary.standing import let_go_of_all

Use = Callable[[nn.Module], None]
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
        patch.setattr(Entrance, "enter", lambda self, *args: (let_go_of_all(), ENTER(self, *args)))
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


def assert_as_anew(policy: Policy, use: Use, tolerance: float = 0.0) -> None:
    """Training goes as with a graph that gets everything anew, whatever else a use does to it."""
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
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
