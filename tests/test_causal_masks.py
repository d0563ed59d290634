"""Masks of `nn.Transformer`: left out if they are causal, and applied if they are not."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from attention_masks import in_graphs, in_model
from torch import Tensor, fx, nn
from torch.nn.modules.transformer import _detect_is_causal_mask as DETECT

import amp_graph
from amp_graph.capture.dynamo import settings

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LENGTH, PADDED = 9, 2
SHAPE = (16, 4, 32, 0.0)
CALLS = (("train", False), ("train", True), ("eval", True), ("no_grad", False))  # mode, padded


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(*SHAPE, batch_first=True), 2)

    def forward(self, x: Tensor, mask: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.layers(x, mask=mask, src_key_padding_mask=padding)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerDecoder(nn.TransformerDecoderLayer(*SHAPE, batch_first=True), 2)

    def forward(self, x: Tensor, mask: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.layers(x, x.flip(1), tgt_mask=mask, tgt_key_padding_mask=padding)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Transformer(16, 4, 1, 1, 32, 0.0, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.layers(x, x, tgt_mask=mask, tgt_key_padding_mask=padding)


class Cached(nn.Module):
    """Prompts have many positions, next tokens one."""

    def __init__(self, by_place: bool) -> None:
        super().__init__()
        self.first, self.second, self.by_place = nn.Linear(8, 8), nn.Linear(8, 8), by_place

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            y = layer(x)[:, None]
            attend, length = nn.functional.scaled_dot_product_attention, x.shape[1]
            if self.by_place:
                x = attend(y, y, y, None, 0.0, length > 1)[:, 0]
            else:
                x = attend(y, y, y, is_causal=length > 1)[:, 0]
        return x


@pytest.mark.parametrize("by_place", [False, True])
def test_whether_attention_is_causal_may_hang_on_a_length(by_place: bool) -> None:
    plain = Cached(by_place)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for length in (5, 6, 1, 7):
        x = torch.randn(2, length, 8)
        torch.testing.assert_close(model(x), plain(x), rtol=0.05, atol=0.05)
    assert not amp_graph.explain(model).data.breaks
    assert not any(plan.fallback for plan in amp_graph.plans(model))


MODELS: tuple[Callable[[], nn.Module], ...] = (Encoder, Decoder, Both)


def causal(length: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length)


def band(length: int) -> Tensor:
    """Of the shape and dtype of a causal mask, and none."""
    at = torch.arange(length)
    return torch.zeros(length, length).masked_fill((at[:, None] - at).abs() > 2, float("-inf"))


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = make()
    return plain, amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")


def compare(models: tuple[nn.Module, nn.Module], mask: Tensor, padded: bool, mode: str) -> None:
    x = torch.randn(3, mask.shape[-1], 16)
    padding = torch.zeros(x.shape[:2])
    padding[1, -PADDED:] = float("-inf") if padded else 0.0  # PyTorch's fast path zeroes these
    results = []
    for model in models:
        model.train(mode == "train").zero_grad()
        with torch.set_grad_enabled(mode != "no_grad"):
            results.append(model(x, mask, padding if padded else None)[padding == 0])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0.06)
    if mode == "no_grad":
        return
    for result in results:
        result.square().sum().backward()
    expected, found = (
        torch.cat([p.grad.flatten() for p in model.parameters()]) for model in models
    )
    assert (found - expected).norm() < 0.02 * expected.norm()


def assert_all_converted(model: nn.Module, graphs: int) -> None:
    plans = amp_graph.plans(model)
    assert [plan.fallback for plan in plans] == [None] * graphs
    assert all(plan.low for plan in plans)


@pytest.mark.parametrize("make", MODELS)
def test_a_mask_is_looked_at_until_one_is_not_causal(make: Callable[[], nn.Module]) -> None:
    models = pair(make)
    for before, (mode, padded) in enumerate(CALLS):
        masks = causal(LENGTH), causal(LENGTH), band(LENGTH), causal(LENGTH), band(LENGTH)
        for mask, graphs in zip(masks, (1, 1, 2, 2, 2), strict=True):
            compare(models, mask, padded, mode)
            assert_all_converted(models[1], graphs=2 * before + graphs)


def test_one_graph_serves_all_masks_from_the_first_that_is_not_causal() -> None:
    models = pair(Encoder)
    for mask in (band(LENGTH), causal(LENGTH), band(LENGTH)):
        compare(models, mask, False, "train")
    assert_all_converted(models[1], graphs=1)


def test_boolean_masks() -> None:
    models = pair(Encoder)
    for mask in (causal(LENGTH) < 0, band(LENGTH) < 0, causal(LENGTH) < 0):
        compare(models, mask, False, "train")
    assert_all_converted(models[1], graphs=2)


class Makes(Encoder):
    """Makes its mask by itself, and does something to it."""

    def __init__(self, change: Callable[[Tensor], Any] = lambda mask: None) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        mask = causal(x.shape[1])
        self.change(mask)
        return super().forward(x, mask)


@torch.library.custom_op("amp_graph_test::soften", mutates_args={"mask"})
def soften(mask: Tensor) -> None:
    mask.clamp_(min=-1.0)


@soften.register_fake
def _(mask: Tensor) -> None: ...


# A mask of -1 hides little.
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "set": lambda mask: operator.setitem(mask, (slice(2, None), 0), float("-inf")),
    "told by place": lambda mask: nn.functional.hardtanh(mask, -1.0, 1.0, True),
    "told by name": lambda mask: nn.functional.hardtanh(mask, -1.0, 1.0, inplace=True),
    "in a list": lambda mask: torch._foreach_clamp_min_([mask], -1.0),
    "by a schema": lambda mask: soften(mask),
    "by an overload": lambda mask: torch.ops.aten.clamp_min_.default(mask, -1.0),
    "by out": lambda mask: torch.clamp(mask, min=-1.0, out=mask),
}


class Owns(Encoder):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", causal(LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, self.mask)


class Alone(Owns):
    """Takes no tensor, for which its buffer would have other guards as well."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, LENGTH, 16))

    def forward(self, count: int) -> Tensor:
        return self.layers(self.positions.expand(count, -1, -1), mask=self.mask)


class Writes(Encoder):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask[2:, 0] = float("-inf")
        return super().forward(x, mask)


class Shorter(Encoder):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, mask[:LENGTH, :LENGTH])


CAUSAL = causal(LENGTH)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], bool]] = {
    "given": (Encoder, (CAUSAL,), False),
    "given as booleans": (Encoder, (CAUSAL < 0,), False),
    "made": (Makes, (), False),
    "its own": (Owns, (), False),
    "of a decoder": (Decoder, (CAUSAL,), False),
    "strict": (Encoder, (CAUSAL.tril(1) + band(LENGTH),), True),
    "the other way": (Encoder, (CAUSAL.mT.contiguous(),), True),
    "finite": (Encoder, (CAUSAL.nan_to_num(neginf=-1e4),), True),
    **{f"made and written: {n}": (partial(Makes, w), (), True) for n, w in WRITES.items()},
    "given and written": (Writes, (CAUSAL,), True),
    "a part": (Shorter, (causal(2 * LENGTH),), True),  # where the model looks as well
}


@pytest.mark.parametrize("name", CASES)
def test_masks_are_left_out_where_the_model_leaves_them_out(name: str) -> None:
    make, masks, is_kept = CASES[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(3, LENGTH, 16)
    expected = in_model(model, x, *[m.clone() for m in masks])
    found = in_graphs(copy.deepcopy(model), x, *[m.clone() for m in masks])
    if is_kept:
        assert found and not any(causal for _, causal in found)
    else:
        assert found == expected
    results = [m(x, *[k.clone() for k in masks]) for m in (model, amp_graph.convert(model))]
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0.06)


def test_a_mask_of_its_own_is_looked_at_again() -> None:
    models = pair(Alone)
    for make in (causal, causal, causal, band, causal):
        for model in models:
            model.mask.copy_(make(LENGTH))
        torch.testing.assert_close(models[1](3), models[0](3), rtol=0, atol=0.06)
    assert_all_converted(models[1], graphs=2)


def test_one_graph_serves_all_lengths_after_the_first() -> None:
    models = pair(Encoder)
    for length in (LENGTH, 5, 30, 12):
        compare(models, causal(length), False, "train")
    assert_all_converted(models[1], graphs=2)


def test_what_the_caller_says_of_a_mask_holds() -> None:
    with settings():
        for said in (False, True):
            call = torch.compile(lambda mask, said: (mask + 1, DETECT(mask, said)), backend="eager")
            assert call(causal(3), said)[1] is call(band(3), said)[1] is said


def test_a_compiler_of_the_user_looks_into_masks_as_ever() -> None:
    model = amp_graph.convert(Encoder(), policy="bfloat16")
    model(torch.randn(3, LENGTH, 16), causal(LENGTH))
    looked: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        looked.append(graph)
        return graph.forward

    look = torch.compile(lambda mask: (mask + 1, DETECT(mask)), backend=backend)
    assert [look(mask)[1] for mask in (causal(5), band(5))] == [True, False]
    assert looked
