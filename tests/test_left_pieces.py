"""Pieces of a model that compute nothing, and that would be captured in each call."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import amp_graph
from amp_graph.capture.budget import MAX_CAPTURES
from amp_graph.convert import record_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
WORDS = 20


def tokenized(texts: list[str]) -> Tensor:
    return torch.tensor([[int(word) % WORDS for word in text.split()] for text in texts])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(WORDS, 16), nn.Linear(16, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.words(ids).mean(dim=1))


class OfTexts(nn.Module):
    """A loss that holds the network, as those of sentence-transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Encoder()

    def prepare(self, texts: list[str]) -> Tensor:
        torch._dynamo.graph_break()
        return tokenized(texts)

    def forward(self, texts: list[str]) -> Tensor:
        return self.network(self.prepare(texts)).square().mean()


def texts(call: int) -> list[str]:
    return [f"{call} {call + k} 7" for k in range(3)]


def test_a_piece_that_reads_texts_is_left_to_python_and_the_network_is_not() -> None:
    model, calls = amp_graph.convert(OfTexts(), policy="bfloat16"), 2 * MAX_CAPTURES
    with warnings.catch_warnings():
        warnings.simplefilter("error", amp_graph.ConversionWarning)
        for call in range(calls):
            counters.clear()
            model(texts(call)).backward()
            assert call < MAX_CAPTURES or not counters["frames"]["total"]
    record = record_of(model)
    assert [*record.runs.values()].count(calls) == 1  # the network's graph
    assert any("in tokenized: it was captured anew again" in told for told in record.breaks)
    assert any(plan.has_low for plan in amp_graph.plans(model))


def test_it_is_captured_for_others() -> None:
    model = amp_graph.convert(OfTexts(), policy="bfloat16")
    for call in range(MAX_CAPTURES):
        model(texts(call))
    counters.clear()
    torch.compile(tokenized, backend="eager")(texts(99))
    assert counters["frames"]["ok"] == 1


class Computes(OfTexts):
    def prepare(self, texts: list[str]) -> Tensor:
        torch._dynamo.graph_break()
        return torch.softmax(self.network.words.weight * len(texts[0]), dim=1)[tokenized(texts)]

    def forward(self, texts: list[str]) -> Tensor:
        return self.network.layer(self.prepare(texts)).square().mean()


def test_a_piece_that_computes_is_not_left() -> None:
    model = amp_graph.convert(Computes(), policy="bfloat16")
    with pytest.warns(amp_graph.ConversionWarning, match="captured anew again and again"):
        for call in range(MAX_CAPTURES):
            model(texts(call))
