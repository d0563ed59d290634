"""Masks of `nn.Transformer`: captured in one graph, and applied whatever they hold."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.variables.builder import VariableBuilder

import amp_graph
from amp_graph.capture.dynamo import settings
from amp_graph.dynamo_changes.causal_masks import DETECT, masks_unread

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
def test_one_graph_serves_all_masks_of_a_kind(make: Callable[[], nn.Module]) -> None:
    models = pair(make)
    for number, (mode, padded) in enumerate(CALLS, 1):
        for mask in (causal(LENGTH), band(LENGTH), causal(LENGTH)):
            compare(models, mask, padded, mode)
        assert_all_converted(models[1], graphs=number)


def test_boolean_masks() -> None:
    models = pair(Encoder)
    for mask in (causal(LENGTH) < 0, band(LENGTH) < 0):
        compare(models, mask, False, "train")
    assert_all_converted(models[1], graphs=1)


def test_one_graph_serves_all_lengths_after_the_first() -> None:
    models = pair(Encoder)
    for length in (LENGTH, 5, 30, 12):
        compare(models, causal(length), False, "train")
    assert_all_converted(models[1], graphs=2)


def test_what_the_caller_says_of_a_mask_holds() -> None:
    with settings():
        for said in (None, False, True):
            call = torch.compile(lambda mask, said: (mask + 1, DETECT(mask, said)), backend="eager")
            assert call(causal(3), said)[1] is (said is True)


def test_a_compiler_of_the_user_looks_into_masks_as_ever() -> None:
    model = amp_graph.convert(Encoder(), policy="bfloat16")
    model(torch.randn(3, LENGTH, 16), causal(LENGTH))
    assert id(DETECT) not in VariableBuilder._id_dispatch()

    looked: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        looked.append(graph)
        return graph.forward

    look = torch.compile(lambda mask: (mask + 1, DETECT(mask)), backend=backend)
    assert [look(mask)[1] for mask in (causal(5), band(5))] == [True, False]
    assert looked


def test_another_stand_in_is_put_back() -> None:
    known = VariableBuilder._id_dispatch()
    other = known[id(DETECT)] = object()
    try:
        with pytest.raises(KeyError), masks_unread(), masks_unread():
            raise KeyError
        assert known[id(DETECT)] is other
    finally:
        del known[id(DETECT)]
