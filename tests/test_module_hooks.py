"""Hooks of modules run whenever they are added, though Dynamo guards none before there are any."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import Net, low_share
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle
from training import distance
from two_layers import BFLOAT16

import amp_graph
from amp_graph.capture import captures
from amp_graph.convert import record_of

X = torch.randn(4, 8)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_hooks_run_whenever_they_are_added() -> None:
    model = amp_graph.convert(Net())
    seen: list[str] = []
    model.first.register_forward_hook(lambda *_: seen.append("early"))
    model(X)
    model.second.register_forward_hook(lambda *_: seen.append("late"))
    model.register_forward_pre_hook(lambda *_: seen.append("root"))
    model(X)
    assert seen == ["early", "root", "early", "late"]
    assert low_share(model, X) == 1


class Aside(Net):
    """Calls a module that is no part of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(aside(self.first(x)))


aside = nn.Linear(16, 16)

Add = Callable[[nn.Module, Callable[..., None]], RemovableHandle]
FIRST_HOOKS: dict[str, tuple[type[Net], Add]] = {
    "the model's": (Net, lambda model, hook: model.register_forward_hook(hook)),
    "a part's": (Net, lambda model, hook: model.second.register_forward_pre_hook(hook)),
    "no part's": (Aside, lambda model, hook: aside.register_forward_hook(hook)),
    "everybody's": (Net, lambda model, hook: register_module_forward_hook(hook)),
}


@pytest.mark.parametrize("whose", FIRST_HOOKS)
def test_the_first_hook_runs_and_goes(whose: str) -> None:
    make, add = FIRST_HOOKS[whose]
    model, seen = make(), []
    amp_graph.convert(model)
    model(X)
    hook = add(model, lambda *_: seen.append(1))
    model(X)
    assert seen
    hook.remove()
    seen.clear()
    model(X)
    assert not seen


def test_a_hook_runs_that_comes_after_one_on_another_module() -> None:
    model, seen = amp_graph.convert(Net()), []
    model.first.register_forward_hook(lambda *_: None)
    model(X)
    model.second.register_forward_hook(lambda *_: seen.append(1))
    model(X)
    assert seen


def test_a_first_backward_hook_sees_the_gradient() -> None:
    model, seen = amp_graph.convert(Net()), []
    model(X).sum().backward()
    model.second.register_full_backward_hook(lambda _, given, come: seen.append(come[0]))
    model(X).sum().backward()
    assert torch.equal(seen[0], torch.ones_like(seen[0]))


def test_own_code_whose_gradients_are_looked_at_runs_in_float32() -> None:
    plain = Net()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    model.second.register_full_backward_hook(lambda *_: None)
    told = pytest.warns(amp_graph.ConversionWarning, match="hooks of modules would see gradients")
    with torch._dynamo.config.patch(disable=True), told:
        assert torch.equal(model(X), plain(X))
    assert torch.equal(model(X), plain(X)), "from then on"


def test_that_it_is_for_a_hook_is_told_in_words_of_users() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    layers[1].register_full_backward_hook(lambda *_: None)
    model = amp_graph.convert(layers, policy="bfloat16")
    with pytest.warns(
        amp_graph.ConversionWarning, match=r": a module has backward hooks; hooks of"
    ):
        model(X)


def test_hooks_of_tensors_have_nothing_captured_anew() -> None:
    model = amp_graph.convert(Net())
    for _ in range(3):
        model(X).register_hook(lambda gradient: gradient)
    assert len(amp_graph.plans(model)) == 1


FOR_ALL = {
    "forward": register_module_forward_hook,
    "forward pre": register_module_forward_pre_hook,
    "backward": register_module_full_backward_hook,
    "backward pre": register_module_full_backward_pre_hook,
}


@pytest.mark.parametrize("kind", ["backward", "backward pre"])
@pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning")
def test_backward_hooks_for_all_modules_see_float32(kind: str) -> None:
    model, seen = Net(), []
    model.second.forward = torch.compiler.disable(model.second.forward)  # between graphs
    amp_graph.convert(model, policy="bfloat16")
    with FOR_ALL[kind](lambda *args: seen.append(args[-1][0].dtype)):
        for _ in range(3):
            model(X).sum().backward()
    assert {*seen} == {torch.float32}


def test_backward_hooks_see_float32_where_nothing_is_to_be_captured() -> None:
    model, seen = Net(), []
    model.first.register_full_backward_hook(lambda *args: seen.append(args[-1][0].dtype))
    amp_graph.convert(model, policy="bfloat16")
    with forward_ad.dual_level():
        model(X).sum().backward()
    assert seen == [torch.float32]


@pytest.mark.parametrize("kind", FOR_ALL)
def test_hooks_for_all_modules_run_and_go_though_others_came_before(kind: str) -> None:
    model, seen = amp_graph.convert(Net()), []
    model.first.register_forward_hook(lambda *_: None)
    for _ in range(2):
        model(X).sum().backward()
        hook = FOR_ALL[kind](lambda *_: seen.append(1))
        model(X).sum().backward()
        assert seen
        hook.remove()
        seen.clear()
        model(X).sum().backward()
        assert not seen


class Wide(nn.Linear):
    """Of another type than what it replaces."""


def test_a_hook_runs_of_a_module_that_is_put_in_later() -> None:
    new = Wide(16, 4)
    seen: list[int] = []
    new.register_forward_hook(lambda *_: seen.append(1))
    model = amp_graph.convert(Net())
    model(X)
    model.second = new
    model(X)
    assert seen


def _asking(module: nn.Module) -> RemovableHandle:
    """What transformers adds to the embedding each time that checkpointing is switched on."""

    def make_inputs_require_grads(module, input, output):  # type: ignore[no-untyped-def]
        output.requires_grad_(True)

    return module.register_forward_hook(make_inputs_require_grads)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo 2.11 ends graphs at such a request")
def test_hooks_that_ask_for_a_gradient_are_captured_once() -> None:
    model, seen = Net(), []
    model.first.requires_grad_(False)
    amp_graph.convert(model)
    handles = []
    for _ in range(4):
        handles.append(_asking(model.first))
        model(X).sum().backward()
    assert len(amp_graph.plans(model)) == 1
    handles.pop().remove()
    model.first.register_forward_hook(lambda _, given, result: seen.append(result.requires_grad))
    model(X)
    assert seen == [True]
    for handle in handles:
        handle.remove()
    model(X)
    assert seen == [True, False]


def test_what_cannot_be_captured_under_hooks_for_all_modules_is_tried_again_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As under a FLOP counter, whose hooks run code that is not the model's."""
    built, model = captures.compile_in_parts, Net()

    def fails_under_hooks(*args: Any) -> Any:
        if torch_module._has_any_global_hook():
            raise RuntimeError("not with these hooks")
        return built(*args)

    monkeypatch.setattr(captures, "compile_in_parts", fails_under_hooks)
    exact = model(X)
    amp_graph.convert(model, policy="bfloat16")
    hook = register_module_forward_hook(lambda *args: None)
    try:
        for _ in range(2):
            assert distance(model(X), exact) <= BFLOAT16
    finally:
        hook.remove()
    assert distance(model(X), exact) <= BFLOAT16
    assert [plan.fallback for plan in amp_graph.plans(model)] == [None]
    assert record_of(model).runs.total() == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_first_call_that_is_only_counted_is_no_verdict(dtype: str) -> None:
    """As Lightning's summary of a model makes it, under hooks with which nothing is captured."""
    model = amp_graph.convert(Net(), policy=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error", amp_graph.ConversionWarning)
        with torch.no_grad(), FlopCounterMode(display=False):
            model(X)
        for _ in range(3):
            model(X).sum().backward()
    data = amp_graph.explain(model).data
    assert data.dtype == dtype and not data.fallbacks
    assert low_share(model, X) == 1


def test_hooks_for_all_modules_that_stay_leave_the_model_to_autocast() -> None:
    model = amp_graph.convert(nn.Sequential(Net()), policy="bfloat16")
    with FlopCounterMode(display=False):
        for _ in range(4):
            model(X)
    (reason,) = amp_graph.explain(model).data.fallbacks
    assert "runs under autocast" in reason
