"""What the tests of training share: a small model, its float32 twin, overflows, comparisons."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import amp_graph
from amp_graph import Policy

# Every value in a float16 graph is rounded to 11 bits, an error of 2^-11 = 0.0005 at most. A
# gradient of the small models here has about ten roundings behind it: 0.005 of its norm.
FLOAT16 = 0.005

# A batch for `Mlp`, and targets.
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randn(8, 2, generator=torch.Generator().manual_seed(2))


class Mlp(nn.Module):
    def __init__(self, width: int = 8, inputs: int = 4, outputs: int = 2, bias: bool = True):
        super().__init__()
        self.first = nn.Linear(inputs, width, bias=bias)
        self.second = nn.Linear(width, outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def twins(model: nn.Module, policy: Any = "float16") -> tuple[nn.Module, nn.Module]:
    """A model and a converted copy of it, with an optimizer attached: the scale is the policy's."""
    twin = copy.deepcopy(model)
    trained = next((p for p in twin.parameters() if p.requires_grad), None)
    known = [] if trained is None else [torch.optim.SGD([trained], lr=0.0)]
    amp_graph.convert(twin, known, policy=policy)
    return model, twin


def scaled(scale: float, **others: Any) -> Policy:
    """float16 with a loss scale that starts at `scale`."""
    return Policy("float16", loss_scale=amp_graph.LossScale(scale, **others))


def overflow(model: nn.Module) -> None:
    """Put an infinity into a model's gradients."""
    parameter = next(p for p in model.parameters() if p.grad is not None)
    parameter.grad.view(-1)[-1] = math.inf


def distance(value: Tensor, reference: Tensor) -> float:
    """Norm of the difference relative to the reference's norm."""
    assert value.dtype is reference.dtype and value.shape == reference.shape
    return float((value.detach() - reference.detach()).norm() / reference.detach().norm())


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def assert_same_gradients(model: nn.Module, reference: nn.Module, within: float = FLOAT16) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            assert p.grad.dtype is torch.float32, name
            assert distance(p.grad, q.grad) <= within, name


def snapshot(*modules: Any) -> list[Any]:
    """Parameters of models and state of optimizers as they are now."""
    return [
        copy.deepcopy(m.state_dict()["state"] if isinstance(m, torch.optim.Optimizer) else
                      list(m.parameters()))
        for m in modules
    ]  # fmt: skip


def same(a: Any, b: Any) -> bool:
    """Whether nested values are equal to the bit."""
    if isinstance(a, Tensor):
        same_bits = torch.equal(a.detach().view(-1), b.detach().view(-1))
        return a.dtype is b.dtype and a.shape == b.shape and same_bits
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def zero(models: Iterable[nn.Module]) -> None:
    for model in models:
        model.zero_grad()


def is_fresh(state: Mapping[Any, Mapping[str, Any]]) -> bool:
    """Whether an optimizer's state is what it begins with: zeros, if there is any. A fused one
    makes them before it asks whether to skip."""
    values = [value for of_one in state.values() for value in of_one.values()]
    return all(isinstance(value, Tensor) and not value.any() for value in values)


def assert_skips(
    model: nn.Module, optimizer: torch.optim.Optimizer, pattern: Iterable[bool]
) -> None:
    """Take steps, some with gradients that overflow: exactly those change nothing."""
    for overflows in pattern:
        before = snapshot(model, optimizer)
        optimizer.zero_grad()
        model(X).square().mean().backward()
        if overflows:
            overflow(model)
        optimizer.step()
        assert same(snapshot(model, optimizer), before) is overflows
