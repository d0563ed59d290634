"""Attention of transformers is captured with a mask only where the model would have made one."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_masks import in_graphs, in_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    ViTConfig,
    ViTModel,
    masking_utils,
)
from transformers.masking_utils import find_packed_sequence_indices

import amp_graph
from amp_graph.dynamo_changes.in_force import changes_in_force

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "initializer_range": 0.4,  # attention is not even then
}
WORDS = SIZES | {"vocab_size": 11, "num_key_value_heads": 1, "use_cache": False}
IDS = torch.arange(24).view(2, 12) % 11
FULL = torch.ones(2, 12, dtype=torch.int64)
PADDED = FULL.clone()
PADDED[1, 8:] = 0
PACKED = torch.tensor([*range(5), *range(7)]).expand(2, -1)
IMAGES = torch.linspace(-1, 1, 3 * 64).view(1, 3, 8, 8)
PATCHES = {"image_size": 8, "patch_size": 4}


def llama(**given: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**WORDS | given))


def mistral() -> nn.Module:
    return MistralForCausalLM(MistralConfig(**WORDS, sliding_window=4))


def bert() -> nn.Module:
    return BertModel(BertConfig(**SIZES, vocab_size=11))


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "llama": (llama, {"input_ids": IDS}),
    "with a cache": (lambda: llama(use_cache=True), {"input_ids": IDS}),
    "full": (llama, {"input_ids": IDS, "attention_mask": FULL}),
    "padded": (llama, {"input_ids": IDS, "attention_mask": PADDED}),
    "packed": (llama, {"input_ids": IDS, "position_ids": PACKED}),
    "window": (mistral, {"input_ids": IDS}),
    "full window": (mistral, {"input_ids": IDS, "attention_mask": FULL}),
    "bert": (bert, {"input_ids": IDS}),
    "full bert": (bert, {"input_ids": IDS, "attention_mask": FULL}),
    "padded bert": (bert, {"input_ids": IDS, "attention_mask": PADDED}),
    "vit": (
        lambda: ViTModel(ViTConfig(**SIZES | PATCHES)),
        {"pixel_values": IMAGES},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_masks_are_those_of_the_model(name) -> None:
    make, batch = CASES[name]
    model = make().eval()
    expected = in_model(model, **batch)
    assert len(expected) == 2
    with torch.no_grad():
        assert in_graphs(model, **batch) == expected


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_model(name) -> None:
    make, batch = CASES[name]
    model = make().eval()
    expected = model(**batch)[0]
    found = amp_graph.convert(model, policy="bfloat16")(**batch)[0]
    assert (found - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.filterwarnings("ignore:.*is converted already")  # in_graphs converts it each time
def test_sizes_that_change_need_no_mask_either() -> None:
    seen = []
    model = llama()
    for rows, length in ((2, 12), (1, 12), (2, 8), (3, 9)):
        ids = torch.ones(rows, length, dtype=torch.int64)
        seen.append(in_graphs(model, input_ids=ids))
    assert {call for calls in seen for call in calls} == {(False, True)}
    assert seen[-1] == []  # captured for any size by then


@pytest.mark.parametrize("make", [llama, bert])
def test_a_mask_is_looked_at_until_one_is_not_full(make) -> None:
    model = make().eval()
    converted = amp_graph.convert(copy.deepcopy(model), policy="bfloat16")
    captured = []
    for mask in (FULL, FULL.bool(), FULL, PADDED, FULL, PADDED.flip(0), FULL):
        batch = {"input_ids": IDS, "attention_mask": mask}
        kept = mask.bool() if make is bert else torch.ones(2, 12, dtype=torch.bool)
        expected, found = (m(**batch)[0][kept] for m in (model, converted))
        assert (found - expected).norm() <= 0.02 * expected.norm()
        captured.append(len(amp_graph.plans(converted)))
    assert captured == [1, 2, 2, 3, 3, 3, 3]


class Masked(nn.Module):
    def __init__(self, hide: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.hide = bert(), hide

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        self.hide(mask)
        return self.inner(input_ids=ids, attention_mask=mask)[0]


def _in_place(mask: Tensor) -> None:
    mask &= PADDED


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "set": lambda mask: operator.setitem(mask, (1, slice(8, None)), 0),
    "method": lambda mask: mask.mul_(PADDED),
    "operator": _in_place,
    "of a view": lambda mask: mask[1:].logical_and_(PADDED[1:]),
    "by out": lambda mask: torch.mul(mask, PADDED, out=mask),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_mask_that_was_written_into_is_not_taken_for_full(write: str) -> None:
    model = Masked(WRITES[write]).eval()
    expected = model(IDS, FULL.clone())
    found = amp_graph.convert(model, policy="bfloat16")(IDS, FULL.clone())
    assert (found - expected).norm() <= 0.02 * expected.norm()
    unmasked = amp_graph.restore(model).inner(input_ids=IDS)[0]
    assert (unmasked - expected).norm() > 0.02 * expected.norm()  # it makes a difference


class MaskMaking(nn.Module):
    """As models do that are given no mask, and hide what is padded in one of their own."""

    def __init__(self, make: Callable[[Tensor], Tensor], hide: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.masked, self.make = Masked(hide), make

    def forward(self, ids: Tensor) -> Tensor:
        return self.masked(ids, self.make(ids))


ONES: dict[str, Callable[[Tensor], Tensor]] = {
    "ones": lambda ids: torch.ones(ids.shape, dtype=torch.int64),
    "ones_like": torch.ones_like,
    "new_ones": lambda ids: ids.new_ones(ids.shape, dtype=torch.bool),
    "full": lambda ids: torch.full(ids.shape, 1.0),
    "full of": lambda ids: torch.full(size=ids.shape, fill_value=True),
}


@pytest.mark.parametrize("name", ONES)
def test_a_mask_of_ones_that_the_model_makes_is_full(name: str) -> None:
    model = MaskMaking(ONES[name], lambda mask: None).eval()
    with torch.no_grad():
        assert in_graphs(model, ids=IDS) == [(False, False)] * 2


@pytest.mark.parametrize("write", WRITES)
def test_one_that_it_writes_into_is_not(write: str) -> None:
    model = MaskMaking(torch.ones_like, WRITES[write]).eval()
    expected = model(IDS)
    found = amp_graph.convert(model, policy="bfloat16")(IDS)
    assert (found - expected).norm() <= 0.02 * expected.norm()


def test_a_function_of_another_version_is_asked_itself(monkeypatch) -> None:
    """As transformers had it in 4.56, where the window came fifth."""

    def older(padding_mask: Any, query_length: int, kv_length: int, offset: int, size: int) -> bool:
        return False

    older.__module__, older.__name__ = masking_utils.__name__, "_ignore_causal_mask_sdpa"
    monkeypatch.setattr(masking_utils, older.__name__, older)

    def call(mask: Tensor) -> tuple[Tensor, bool]:
        return mask + 1, masking_utils._ignore_causal_mask_sdpa(mask, 12, 12, 0, 4)

    with changes_in_force():
        assert torch.compile(call, backend="eager")(FULL)[1] is False


STEPS: dict[str, Callable[[Tensor], Any]] = {
    "plus a number": lambda p: p + 3,
    "plus ones": lambda p: p + torch.ones_like(p),
    "plus itself": lambda p: p + p,
    "minus a number": lambda p: p - 1,
    "times": lambda p: p * 2,
    "times in place": lambda p: p.mul_(2),
    "set": lambda p: _set(p),
    "set in a view": lambda p: (_set(p[..., 2:]), p)[1],
    "set beside": lambda p: (p.mul_(3), p)[1],
    "unsqueezed": lambda p: p.unsqueeze(0),
    "unsqueezed last": lambda p: p.unsqueeze(-1),
    "indexed": lambda p: p[None, :],
    "indexed in part": lambda p: p[None, ::2] if p.dim() == 1 else p[:, ::2],
    "expanded": lambda p: p.expand(2, -1) if p.dim() < 3 else p,
    "expanded last": lambda p: p[..., :1].expand(*p.shape),
    "flipped": lambda p: p.flip(-1),
    "clamped": lambda p: p.clamp(max=3),
}


def _set(p: Tensor) -> Tensor:
    p[..., 1:3] = 0
    return p


SIMPLE = {"plus a number", "unsqueezed", "indexed", "expanded"}
STARTS = (lambda: torch.arange(6), lambda: torch.arange(2, 8), lambda: torch.arange(0, 12, 2))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(STARTS), st.lists(st.sampled_from([*STEPS]), max_size=4))
def test_no_packed_sequence_is_overlooked(start, names) -> None:
    def is_one_sequence(x: Tensor) -> Tensor:
        positions = start()
        for name in names:
            positions = STEPS[name](positions)
        if positions.dim() == 1:
            positions = positions[None]
        return x + 1 if find_packed_sequence_indices(positions) is None else x

    torch._dynamo.reset()
    x = torch.zeros(1)
    try:
        expected = is_one_sequence(x)
    except RuntimeError:  # a size that does not fit
        return
    with changes_in_force():
        found = torch.compile(is_one_sequence, backend="eager")(x)
    assert found <= expected
    if start is not STARTS[2] and not set(names) - SIMPLE:
        assert found == expected
