"""Classifiers of transformers, whose first call with labels writes into their configuration."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn
from training import distance
from two_layers import BFLOAT16

import amp_graph
from amp_graph.convert import record_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

TOKENS = torch.randint(5, 50, (4, 8), generator=torch.Generator().manual_seed(0))
SIZES = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
BERT = transformers.BertForSequenceClassification, transformers.BertConfig  # in its own forward
LLAMA = transformers.LlamaForSequenceClassification, transformers.LlamaConfig  # in another function
LABELS = {  # and how many there are
    "regression": (1, torch.rand(4)),
    "single_label_classification": (3, torch.tensor([0, 1, 2, 0])),
    "multi_label_classification": (3, torch.ones(4, 3)),
}


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("family", [BERT, LLAMA], ids=["bert", "llama"])
def test_they_are_captured_once(family: tuple[type, type], kind: str) -> None:
    torch.manual_seed(0)
    (number, labels), (model_class, config) = LABELS[kind], family
    plain = model_class(config(**SIZES, num_labels=number)).eval()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for _ in range(2):
        plain.zero_grad(), model.zero_grad()
        losses = [each(input_ids=TOKENS, labels=labels).loss for each in (plain, model)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses, rtol=0.02, atol=0.01)
        assert distance(gradients(model), gradients(plain)) <= BFLOAT16
        assert model.config.problem_type == plain.config.problem_type == kind
    assert record_of(model).runs.total() == 2 and len(record_of(model).plans) == 1


def test_what_was_chosen_stays() -> None:
    model_class, config = BERT
    chosen = "multi_label_classification"
    plain = model_class(config(**SIZES, num_labels=3, problem_type=chosen))
    model = amp_graph.convert(plain, policy="bfloat16")
    for _ in range(2):
        model(input_ids=TOKENS, labels=torch.ones(4, 3)).loss.backward()
    assert model.config.problem_type == chosen and len(record_of(model).plans) == 1
