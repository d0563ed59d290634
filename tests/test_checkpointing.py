"""Gradient checkpointing inside a converted model recomputes what was computed."""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counting import MatmulCounter
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import amp_graph
from amp_graph import Policy
from amp_graph.capture.budget import MAX_CAPTURES

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def save_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


class Block(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Linear(16, 16), nn.Linear(16, 16), how

    def inner(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(torch.relu(self.first(x)), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, **self.how)


def trained(
    model: nn.Module, x: Tensor, policy: Policy | None
) -> tuple[list[Tensor], Tensor, MatmulCounter]:
    """Gradients, the random state after a step, and the matrix products of the step."""
    if policy is not None:
        amp_graph.convert(model, policy=policy)
        with torch.no_grad():
            model(x)
            model.train()(x)
    torch.manual_seed(5)
    with MatmulCounter() as products:
        model(x).square().mean().backward()
    return [p.grad for p in model.parameters()], torch.get_rng_state(), products


def recomputed(products: MatmulCounter) -> int:
    return sum(n for (name, _), n in products.backward.items() if name == "addmm")


def assert_all_low_and_alike(of_model: Any, of_plain: Any) -> None:
    """Of what `trained` returns: every product is low, also those that are computed again."""
    (found, state, products), (expected, expected_state, _) = of_model, of_plain
    assert torch.equal(state, expected_state)
    assert recomputed(products) > 0
    assert products.low_share == products.backward_low_share == 1
    for gradient, other in zip(found, expected, strict=True):
        assert (gradient - other).norm() < 0.02 * other.norm()


@pytest.mark.skipif(torch.__version__ < "2.14", reason="checkpoint is no decorator before")
@pytest.mark.parametrize("is_method", [False, True])
def test_a_decorated_function_runs_under_autocast(is_method: bool) -> None:
    """Dynamo leaves it to Python."""

    class Decorated(Block):
        if is_method:
            inner = checkpoint(use_reentrant=False)(Block.inner)

        def forward(self, x: Tensor) -> Tensor:
            if is_method:
                return self.inner(x)
            return checkpoint(use_reentrant=False)(self.inner)(x)

    torch.manual_seed(0)
    model, plain, x = Decorated(), Block(use_reentrant=False), torch.randn(8, 16)
    model.load_state_dict(plain.state_dict())
    with pytest.warns(amp_graph.ConversionWarning, match="runs under autocast"):
        of_model = trained(model, x, Policy("bfloat16"))
    assert_all_low_and_alike(of_model, trained(plain, x, None))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_dropped_stays_dropped(dtype: str, use_reentrant: bool) -> None:
    x = torch.randn(8, 16, requires_grad=use_reentrant)
    torch.manual_seed(0)
    model, plain = Block(use_reentrant=use_reentrant), Block(use_reentrant=use_reentrant)
    model.load_state_dict(plain.state_dict())
    of_model = trained(model, x, Policy(dtype))
    assert_all_low_and_alike(of_model, trained(plain, x, None))


class InSegments(nn.Module):
    """Five blocks, of which the last is in the last segment, that is not computed again."""

    def __init__(self, as_list: bool, **how: Any) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))
        self.as_list, self.how = as_list, how

    def forward(self, x: Tensor) -> Tensor:
        blocks = [*self.blocks] if self.as_list else self.blocks
        return checkpoint_sequential(blocks, 2, x, **self.how)


@pytest.mark.parametrize("how", [{"use_reentrant": True}, {"use_reentrant": False}], ids=str)
@pytest.mark.parametrize("as_list", [False, True])
def test_segments_of_a_sequence(as_list: bool, how: dict[str, bool]) -> None:
    plain, x = InSegments(as_list, **how), torch.randn(4, 16, requires_grad=True)
    model = copy.deepcopy(plain)
    gradients, _, counter = trained(model, x, Policy("bfloat16"))
    expected, _, _ = trained(plain, x, None)
    assert counter.low_share == 1
    assert recomputed(counter) == 1  # of the two in the first segment, as it stops early
    plans = amp_graph.plans(model)  # without gradients, and with
    assert [(plan.fallback, len(plan.bodies)) for plan in plans] == [(None, 1)] * 2
    for found, reference in zip(gradients, expected, strict=True):
        assert (found - reference).norm() < 0.02 * reference.norm()


def test_selective_checkpointing_saves_what_it_is_told() -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    model = Block(use_reentrant=False, context_fn=contexts)
    _, _, products = trained(model, torch.randn(8, 16), Policy("bfloat16"))
    assert recomputed(products) == 0


class Outside(nn.Module):
    """A product between two graphs, which is under autocast from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.outside(self.first(x)).relu()).sin()

    @torch._dynamo.disable
    def outside(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Counting:
    """Hooks for all modules, as FlopCounterMode has."""

    def __enter__(self) -> None:
        self.handle = nn.modules.module.register_module_forward_hook(lambda *_: None)

    def __exit__(self, *_: object) -> None:
        self.handle.remove()


@pytest.mark.parametrize("around_backward", [contextlib.nullcontext, Counting])
def test_a_converted_model_as_a_checkpoint_s_whole_function(around_backward: Any) -> None:
    """The second forward ends early, by an error of the checkpoint's that is no failure; and does
    what the first one did, whatever has changed since."""
    torch.manual_seed(0)
    model, x = amp_graph.convert(Outside(), policy="bfloat16"), torch.randn(4, 16).requires_grad_()
    plain = Outside()
    plain.load_state_dict(model.state_dict())
    plain(x).sum().backward()
    for _ in range(4):
        model.zero_grad()
        result = checkpoint(model, x, use_reentrant=False)
        with around_backward():
            result.sum().backward()
        for ours, float32 in zip(model.parameters(), plain.parameters(), strict=True):
            assert (ours.grad - float32.grad).norm() < 0.02 * float32.grad.norm()
    assert [plan.autocast for plan in amp_graph.plans(model)].count(True) == 1


class Tagged(Block):
    """Its attribute is another at each call, so that it is captured anew until that is too much."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * len(self.tag + "!")


@pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning")
def test_a_model_that_is_given_up_computes_again_what_it_did_before() -> None:
    model = amp_graph.convert(Tagged(), policy="bfloat16")
    for step in range(2 * MAX_CAPTURES):
        model.tag = f"{step}"
        checkpoint(model, torch.randn(4, 16), use_reentrant=False).sum().backward()
    assert amp_graph.plans(model)[-1].autocast


def test_copies_for_safety_are_not_what_a_checkpoint_keeps() -> None:
    contexts = functools.partial(
        create_selective_checkpoint_contexts, [torch.ops.aten.clone.default]
    )
    model = amp_graph.convert(Outside(), policy="bfloat16")
    for _ in range(2):
        x = torch.randn(4, 16, requires_grad=True)
        checkpoint(model, x, use_reentrant=False, context_fn=contexts).sum().backward()


class Normed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.use_reentrant = nn.Conv2d(2, 4, 3), use_reentrant
        self.block = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, self.first(x), use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_buffers_that_are_written_inside_of_a_checkpoint(use_reentrant: bool) -> None:
    """`torch.compile(backend="eager")` saves them, and raises in the backward pass (torch 2.13)."""
    plain = Normed(use_reentrant)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    x = torch.randn(4, 2, 8, 8)
    for each in (plain, model):
        for _ in range(2):
            each(x).square().mean().backward()
    assert not [p.fallback for p in amp_graph.plans(model) if p.fallback]
    for own, other in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(own, other, atol=0.01, rtol=0.01)
    gradient, expected = model.first.weight.grad, plain.first.weight.grad
    assert (gradient - expected).norm() <= 0.05 * expected.norm()
