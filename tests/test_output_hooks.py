"""Models of transformers that are asked for hidden states, and hook onto their layers for it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from training import assert_same_gradients
from two_layers import BFLOAT16

import amp_graph
from amp_graph.convert import record_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

TOKENS = torch.randint(5, 50, (2, 8), generator=torch.Generator().manual_seed(0))


def llama() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def loss(model: Any, **asked: bool) -> torch.Tensor:
    found = model(input_ids=TOKENS, labels=TOKENS, use_cache=False, **asked)
    states = found.hidden_states if asked else [torch.zeros(1)]
    return found.loss + sum(each.square().mean() for each in states)


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("asked_first", [True, False])
def test_they_are_one_graph(asked_first: bool, checkpoints: bool) -> None:
    plain = llama()
    if checkpoints:
        plain.gradient_checkpointing_enable()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for asked in (asked_first, True, True):
        plain.zero_grad(), model.zero_grad()
        given = {"output_hidden_states": True} if asked else {}
        losses = [loss(each, **given) for each in (plain, model)]
        for each in losses:
            each.backward()
        torch.testing.assert_close(*losses, rtol=0.02, atol=0)
        assert_same_gradients(model, plain, within=BFLOAT16)
        hooks = [len(layer._forward_hooks) for layer in plain.model.layers]
        assert [len(layer._forward_hooks) for layer in model.model.layers] == hooks
    assert not record_of(model).breaks
    assert record_of(model).runs.total() == 3  # one in each call
    if asked_first:
        assert len(record_of(model).plans) == 1  # hooks that its own code has put there are guarded


def test_one_that_is_taken_off_is_seen() -> None:
    model = amp_graph.convert(llama(), policy="bfloat16")
    assert len(model(input_ids=TOKENS, output_hidden_states=True).hidden_states) == 4
    seen: list[torch.Tensor] = []
    handle = model.model.layers[1].register_forward_hook(lambda _, __, y: seen.append(y))
    model(input_ids=TOKENS, output_hidden_states=True)
    handle.remove()
    model(input_ids=TOKENS, output_hidden_states=True)
    assert len(seen) == 1


@pytest.mark.parametrize("how", ["another", "deepcopy", "again"])
def test_hooks_that_come_after_those_are_seen_by_a_model_that_is_alike(how: str) -> None:
    """It was called before by graphs of the first one, which look for no hooks."""
    first = amp_graph.convert(llama(), policy="bfloat16")
    first(input_ids=TOKENS)
    if how == "deepcopy":
        model = copy.deepcopy(first)
    elif how == "again":
        model = amp_graph.convert(amp_graph.restore(first), policy="bfloat16")
    else:
        model = amp_graph.convert(llama(), policy="bfloat16")
    model(input_ids=TOKENS)
    model(input_ids=TOKENS, output_hidden_states=True)
    model.lm_head.register_forward_hook(lambda _, __, y: y * 0)
    assert not model(input_ids=TOKENS).logits.any()
