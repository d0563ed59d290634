"""What a model asks of its own state, and what is on around it, is what it is in each call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X = torch.ones(4, 8)


class Asking(nn.Module):
    """Its layer times `gain`, for which it asks in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.options = nn.Identity()  # an object of another class

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.gain()

    def gain(self) -> Any:
        raise NotImplementedError


class Counts(Asking):
    """Sets itself up in its first call."""

    def gain(self) -> int:
        if "calls" not in self.__dict__:
            self.calls = 0
        self.calls += 1
        return self.calls


class CountsInVars(Asking):
    def gain(self) -> int:
        if "calls" not in vars(self):
            self.calls = 0
        self.calls += 1
        return self.calls


class Gets(Asking):
    def gain(self) -> float:
        found: float = self.__dict__.get("late", 1.0)
        return found


class GetsOfAnother(Asking):
    def gain(self) -> float:
        return 3.0 if "late" in vars(self.options) else 1.0


class Tries(Asking):
    def gain(self) -> Any:
        try:
            return self.late
        except AttributeError:
            return 1.0


class Hides(Asking):
    """A property whose getter finds nothing at first, while the module keeps what it is for."""

    shown = property(lambda self: self.late)

    def __init__(self) -> None:
        super().__init__()
        self.shown = nn.Parameter(torch.ones(8))

    def gain(self) -> Any:
        return self.shown


class Defaults:
    """Has all names, with one value."""

    def __getattr__(self, name: str) -> float:
        if name.startswith("__"):
            raise AttributeError(name)
        return 1.0


class HasDefaults(Asking):
    def __init__(self) -> None:
        super().__init__()
        del self.options
        self.options = Defaults()

    def gain(self) -> Any:
        return self.options.late


class IsDefault(Asking):
    """A model with a value for one name that it does not have."""

    def __getattr__(self, name: str) -> Any:
        return 1.0 if name == "late" else super().__getattr__(name)

    def gain(self) -> Any:
        return self.late


@pytest.mark.parametrize(
    "kind",
    [Counts, CountsInVars, Gets, GetsOfAnother, Tries, Hides, HasDefaults, IsDefault],
)
@pytest.mark.filterwarnings("error::amp_graph.ConversionWarning")
def test_state_that_is_set_after_the_first_call(kind: type[Asking]) -> None:
    plain = kind()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for call in range(5):
        if call == 2:
            for each in (plain, model):
                each.late = each.options.late = 5.0
        torch.testing.assert_close(model(X), plain(X), rtol=0.05, atol=0.05)
    assert len(amp_graph.plans(model)) <= 3


class ReadsItsOptions(nn.Module):
    """Names that it does not have are those of a dict, which raises KeyError."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.options = {"gain": 2.0}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return self.__dict__["options"][name]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.gain


def test_a_model_that_raises_another_error_for_a_name_that_it_does_not_have() -> None:
    plain = ReadsItsOptions()
    expected = plain(X)
    torch.testing.assert_close(
        amp_graph.convert(plain, policy="bfloat16")(X), expected, rtol=0.05, atol=0.05
    )


class Attends(Asking):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)[None]
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(x, x, x)


def kernels() -> list[bool]:
    enabled: list[Callable[[], bool]] = [
        cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled,
    ]  # fmt: skip
    return [is_enabled() for is_enabled in enabled]


def test_kernels_of_attention_are_put_back_as_they_were_in_that_call() -> None:
    model = amp_graph.convert(Attends(), policy="bfloat16")
    model(X)
    before = kernels()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        chosen = kernels()
        assert chosen != before
        model(X)
        assert kernels() == chosen
    model(X)
    assert kernels() == before
    (*_, last) = amp_graph.plans(model)
    assert last.fallback is None


class AttendsTwice(Attends):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)[None]
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
            return super().forward(x[0]) + F.scaled_dot_product_attention(x, x, x)


@pytest.mark.filterwarnings("error::amp_graph.ConversionWarning")
def test_kernels_may_be_chosen_inside_of_a_choice() -> None:
    model, before = amp_graph.convert(AttendsTwice(), policy="bfloat16"), kernels()
    for _ in range(2):
        model(X)
    (plan,) = amp_graph.plans(model)
    assert plan.fallback is None and kernels() == before


class Doubles(TorchFunctionMode):
    """Doubles what linear layers compute."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is F.linear else result


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_function_mode_does_what_it_does_once(device: str | None) -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    if device is not None:
        torch.set_default_device(device)
    try:
        for _ in range(2):
            torch.testing.assert_close(model(X), plain(X), rtol=0.05, atol=0.05)
            with Doubles():
                expected, found = plain(X), model(X)
                assert len(torch.overrides._get_current_function_mode_stack()) == 1 + bool(device)
            torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    finally:
        torch.set_default_device(None)
    assert all(plan.fallback is None for plan in amp_graph.plans(model))
