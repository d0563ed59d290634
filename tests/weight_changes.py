"""Ways to change the parameters of an `Mlp`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from training import Mlp, X, scaled

import amp_graph

SCALED = scaled(2.0**8)
with torch.random.fork_rng():
    torch.manual_seed(7)  # of 3000 others, 7 have a gradient that float16 is further away from
    OTHER = Mlp().state_dict()


def now(model: nn.Module, policy: Any = SCALED) -> Tensor:
    """What the parameters as they are now make of X: by a new model, converted now."""
    new = copy.deepcopy(amp_graph.restore(copy.deepcopy(model)))
    with torch.no_grad():
        return amp_graph.convert(new, policy=policy)(X)


def assert_seen(model: nn.Module, change: Callable[[nn.Module], Any], around: Any) -> None:
    """What runs in `around` after a change computes with the parameters as they are then."""
    with around():
        model(X)
        before = model(X).clone()
    change(model)
    with around():
        after = model(X)
    assert torch.equal(after, now(model))
    assert not torch.equal(after, before)


def by_optimizer(kind: Any, **options: Any) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        optimizer = kind(model.parameters(), lr=0.1, **options)
        for _ in range(3):
            model.zero_grad()
            model(X).square().mean().backward()
            assert optimizer.step() is not False
        assert amp_graph.step_counts(optimizer).stepped in (0, 3)

    return change


def by_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(0.5)
        p.data.add_(torch.ones(()), alpha=0.1)


def by_new_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data * 0.5


def by_numpy(model: nn.Module) -> None:
    for p in model.parameters():
        np.multiply(p.detach().numpy(), 0.5, out=p.detach().numpy())


def by_copy(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p * 0.5)


def by_memory_shared_with_another(model: nn.Module) -> None:
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    nn.utils.vector_to_parameters(flat, model.parameters())  # views into one buffer
    flat.mul_(0.5)


def by_set(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.set_(p * 0.5)


def by_replacement(model: Any) -> None:
    model.first.weight = nn.Parameter(torch.randn(8, 4))
    model.second = nn.Linear(8, 2)


def by_resizing(model: Any) -> None:
    for name in ("weight", "bias"):
        parameter = getattr(model.first, name)
        parameter.data = torch.cat([parameter.data] * 2)
    model.second.weight.data = torch.randn(2, 16)


def by_assigned_state(model: nn.Module) -> None:
    model.load_state_dict({k: v.clone() for k, v in OTHER.items()}, assign=True)


def by_other_strides(model: Any) -> None:
    model.first.weight.data = torch.randn(4, 8).t()


CHANGES = {
    "SGD": by_optimizer(SGD, momentum=0.9),
    "SGD foreach": by_optimizer(SGD, foreach=True),
    "SGD fused": by_optimizer(SGD, fused=True),
    "Adam foreach": by_optimizer(Adam, foreach=True),
    "AdamW fused": by_optimizer(AdamW, fused=True),
    "AdamW plain": by_optimizer(AdamW, foreach=False),
    ".data in place": by_data,
    ".data replaced": by_new_data,
    "numpy": by_numpy,
    "copy_": by_copy,
    "memory shared with a flat buffer": by_memory_shared_with_another,
    "set_": by_set,
    "load_state_dict": lambda model: model.load_state_dict(OTHER),
    "load_state_dict assign": by_assigned_state,
    "parameters replaced": by_replacement,
    "parameters resized": by_resizing,
    "other strides": by_other_strides,
    "moved there and back": lambda model: by_data(model.double()) or model.float(),
    "init": lambda model: [nn.init.normal_(p) for p in model.parameters()],
    "apply": lambda model: model.apply(lambda m: getattr(m, "reset_parameters", int)()),
}


class ByHand(Optimizer):
    """Calls its closure twice and writes through `.data` in between."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad, alpha=-0.1)
        with torch.enable_grad():
            loss = closure()
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad, alpha=-0.1)
        return loss


class ByHandTwice(ByHand):
    """Goes on in the same way after the step of its base class."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return ByHand.step.__wrapped__(self, closure)  # type: ignore[attr-defined]
