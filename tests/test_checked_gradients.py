"""Gradients are checked once: on their way out of a graph, or else when the optimizer steps."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from counting import DispatchCounter
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from training import Mlp, X, same, scaled, snapshot

import amp_graph
from amp_graph.gradients.checked_gradients import CheckedGradients

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

CHECK = "_amp_foreach_non_finite_check_and_unscale_"


class Checks(DispatchCounter):
    """How many numbers were checked."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def record(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        self.numbers += sum(t.numel() for t in args[0]) if name == CHECK else 0


def trained(kind: Any = SGD, **options: Any) -> tuple[nn.Module, Any]:
    """A converted model and its optimizer after a step."""
    model = Mlp()
    optimizer = kind(model.parameters(), lr=0.1, **options)
    amp_graph.convert(model, optimizer, policy=scaled(2.0**10))
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def backward(model: nn.Module, x: Tensor = X) -> None:
    model(x).square().mean().backward()


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("kind", "options"), [(SGD, {}), (AdamW, {"fused": True}), (AdamW, {"foreach": True})]
)
def test_a_step_checks_every_gradient_once(kind: Any, options: Any) -> None:
    model, optimizer = trained(kind, **options)
    for overflows in (False, True, False):
        optimizer.zero_grad()
        with Checks() as checks:
            backward(model, X * math.inf if overflows else X)
            assert checks.numbers == size(model)
            assert bool(optimizer.step()) is not overflows
        assert checks.numbers == size(model)


def test_gradients_of_channels_last_weights_too() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    model.to(memory_format=torch.channels_last)
    optimizer = SGD(model.parameters(), lr=0.1)
    amp_graph.convert(model, optimizer, policy=scaled(2.0**10))
    for _ in range(2):
        optimizer.zero_grad()
        with Checks() as checks:
            backward(model, torch.randn(2, 3, 8, 8))
            optimizer.step()
        assert checks.numbers == size(model)


def hook(model: nn.Module, change: Callable[[Tensor], Tensor | None]) -> None:
    model.second.weight.register_hook(change)
    backward(model)


def accumulate(model: nn.Module) -> None:
    backward(model)
    with torch.no_grad():
        for p in model.parameters():
            p.grad.fill_(torch.finfo(torch.float32).max)
    (model(X) * 1e3).sum().backward()


def write_through_a_view(model: nn.Module) -> None:
    backward(model)
    model.first.weight.grad.view(-1)[3] = math.nan


def assign(model: nn.Module) -> None:
    backward(model)
    model.first.bias.grad = torch.full_like(model.first.bias, -math.inf)


def clip_with_a_bad_norm(model: nn.Module) -> None:
    backward(model)
    torch._foreach_mul_([p.grad for p in model.parameters()], math.inf)


def replace_data(model: nn.Module) -> None:
    backward(model)
    model.first.bias.grad.data = torch.full_like(model.first.bias, math.inf)


LATER: dict[str, Callable[[nn.Module], None]] = {
    "a hook that replaces": lambda m: hook(m, lambda g: g * math.inf),
    "a hook that writes": lambda m: hook(m, lambda g: g.mul_(math.inf)),
    "a hook that keeps": lambda m: hook(m, [].append) or m.second.weight.grad.fill_(math.inf),
    "a sum of two": accumulate,
    "a write through a view": write_through_a_view,
    "a foreach write": clip_with_a_bad_norm,
    "an assignment": assign,
    "an assignment to .data": replace_data,
}


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
@pytest.mark.parametrize("how", LATER)
def test_what_became_infinite_later_is_seen(how: str, options: Any) -> None:
    model, optimizer = trained(AdamW, **options)
    before = snapshot(model, optimizer)
    LATER[how](model)
    assert not optimizer.step()
    assert same(snapshot(model, optimizer), before)


def test_gradients_that_went_elsewhere_do_not_count() -> None:
    """An overflow in `torch.autograd.grad` skips no step of an optimizer with other gradients."""
    model, optimizer = trained()
    backward(model)
    overflowed = torch.autograd.grad(model(X * math.inf).sum(), [*model.parameters()])
    assert not all(g.isfinite().all() for g in overflowed)
    assert optimizer.step()


@pytest.mark.parametrize("overflowing", [0, 1])
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
def test_of_two_optimizers_each_skips_for_its_own(options: Any, overflowing: int) -> None:
    """Their gradients leave in one group, whose flag is up for both."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers = nn.ModuleList([Mlp(), Mlp()])

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.towers[0](x).square().mean() + self.towers[1](y).square().mean()

    model = Towers()
    optimizers = [AdamW(t.parameters(), lr=0.1, **options) for t in model.towers]
    amp_graph.convert(model, optimizers, policy=scaled(2.0**10))
    for inputs in ([X, X], [X * math.inf if i == overflowing else X for i in range(2)]):
        model.zero_grad()
        model(*inputs).backward()
        stepped = [bool(o.step()) for o in optimizers]
    assert stepped == [overflowing != 0, overflowing != 1]


@pytest.mark.parametrize("mine", [slice(None), slice(2)], ids=["all", "a part"])
def test_an_infinity_among_other_gradients_skips_no_step_of_those_without(mine: slice) -> None:
    """Of optimizers for the model and something else, and for the model alone."""
    model, other = Mlp(), nn.Parameter(torch.zeros(3))
    parameters = [*model.parameters()]
    both = SGD([*parameters, other], lr=0.1)
    alone = SGD(parameters[mine], lr=0.1)
    amp_graph.convert(model, [both, alone], policy=scaled(2.0**10))
    for overflows in (False, True, False):
        backward(model)
        other.grad = torch.full((3,), torch.inf if overflows else 1.0)
        assert (both.step(), alone.step()) == (not overflows, True)
        both.zero_grad()


def test_gradients_written_to_after_their_check_are_checked_for_their_own_pass() -> None:
    class Towers(nn.ModuleList):
        def forward(self, x: Tensor, tower: int) -> Tensor:
            return self[tower](x).square().mean()

    model = Towers([Mlp(), Mlp()])
    both, alone = SGD(model.parameters(), lr=0.1), SGD(model[1].parameters(), lr=0.1)
    amp_graph.convert(model, [both, alone], policy=scaled(2.0**10))
    for overflows in (False, True, False):
        for tower in range(2):
            model(X, tower).backward()
        next(model.parameters()).grad.mul_(torch.inf if overflows else 0.5)
        assert (both.step(), alone.step()) == (not overflows, True)
        both.zero_grad()


def test_memory_that_is_used_again_is_not_known() -> None:
    memory, checked = bytearray(16), CheckedGradients()
    gradient = torch.frombuffer(memory, dtype=torch.float32)
    checked.unscale_([gradient], torch.ones(()))
    assert checked.known([gradient]) == ([torch.zeros(())], [])
    del gradient
    other = torch.frombuffer(memory, dtype=torch.float32)  # same address, same version
    assert checked.known([other]) == ([], [other])


def test_each_thread_of_a_pass_gets_the_check_of_its_device() -> None:
    """A backward pass has a thread per device."""
    inverses = [torch.ones((), device=device) for device in ("cpu", "meta")]
    wrong: list[Any] = []

    def ask(checked: CheckedGradients, inverse: Tensor, start: threading.Barrier) -> None:
        start.wait()
        for _ in range(30):
            check = checked._check_on(inverse.device)
            wrong.extend([check] if check.made_in[1] != inverse.device else [])

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(100):
            shared = CheckedGradients(), threading.Barrier(4)
            each = [
                threading.Thread(target=ask, args=(shared[0], i, shared[1])) for i in inverses * 2
            ]
            for thread in each:
                thread.start()
            for thread in each:
                thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong


def test_no_gradient_is_kept_alive() -> None:
    model, _ = trained()
    backward(model)
    checked = amp_graph.scale_of(model).checked
    alive = [p.grad.untyped_storage()._cdata for p in model.parameters()]
    assert len(alive) == 4 and checked._checks
    model.zero_grad()
    assert not any(check.memories.are_alive() for check in checked._checks)
    backward(model)
    assert len(checked._checks) == 1


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("is_conj", [False, True])
def test_complex_gradients_are_checked_and_unscaled(by_hand: bool, is_conj: bool) -> None:
    class Phases(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.phases = nn.Parameter(torch.rand(2, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) * self.phases).abs()

    model = Phases()
    optimizer = SGD(model.parameters(), lr=0.1)
    amp_graph.convert(model, optimizer, policy=scaled(2.0**10))
    scaler = amp_graph.GradScaler("cpu", init_scale=2.0**10)
    for gradient in (1 + 2j, complex(1, math.inf)):
        before = snapshot(model)
        backward(model)
        gradients = torch.full((2,), gradient * (2.0**10 if by_hand else 1), dtype=torch.complex64)
        model.phases.grad = gradients.conj() if is_conj else gradients
        if by_hand:
            for p in model.parameters():
                p.grad = p.grad * 2.0**10 if p is not model.phases else p.grad
            scaler.scale(torch.ones(()))
            scaler.unscale_(optimizer)
            if math.isfinite(abs(gradient)):
                assert torch.equal(model.phases.grad.resolve_conj().abs(), torch.full((2,), 5**0.5))
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        assert same(snapshot(model), before) == (not math.isfinite(abs(gradient)))


@pytest.mark.parametrize("clip", [lambda g: g.clamp(-1, 1), lambda g: torch.ones(1).expand_as(g)])
def test_a_gradient_of_one_s_own_is_only_read(clip: Any) -> None:
    """Autograd may have saved it, and a single number that is expanded cannot be written to."""
    model, optimizer = trained()
    backward(model)
    for p in model.parameters():
        p.grad = clip(p.grad)
    factor, before = torch.ones(1, requires_grad=True), snapshot(model)
    penalty = sum((p.grad * factor).sum() for p in model.parameters())
    assert optimizer.step() is True and not same(snapshot(model), before)
    penalty.backward()
    assert factor.grad.isfinite().all()
