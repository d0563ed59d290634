"""Pieces of a model that would be captured in each call."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import amp_graph
from amp_graph.capture.budget import MAX_CAPTURES
from amp_graph.capture.pieces import AGAIN
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


def test_a_setting_of_pytorchs_that_changed_is_told_as_one() -> None:
    model = amp_graph.convert(OfTexts(), policy="bfloat16")
    for call in range(AGAIN):
        model(texts(call)).backward()
    with torch.no_grad():
        model(texts(0))
    told = record_of(model).breaks
    assert any(each.endswith("the last time for a change of PyTorch's grad_mode") for each in told)


def test_it_is_captured_for_others() -> None:
    model = amp_graph.convert(OfTexts(), policy="bfloat16")
    for call in range(MAX_CAPTURES):
        model(texts(call))
    counters.clear()
    torch.compile(tokenized, backend="eager")(texts(99))
    assert counters["frames"]["ok"] == 1


class InFloat32(OfTexts):
    def forward(self, texts: list[str]) -> Tensor:
        return self.weighted(self.network(self.prepare(texts)), texts).square().mean()

    def weighted(self, x: Tensor, texts: list[str]) -> Tensor:
        torch._dynamo.graph_break()
        return x.softmax(1) * sum(int(word) for word in texts[0].split())


def test_a_piece_in_float32_is_left_as_well() -> None:
    plain = InFloat32()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("error", amp_graph.ConversionWarning)
        for call in range(MAX_CAPTURES):
            loss = model(texts(call))
            loss.backward()
    torch.testing.assert_close(loss, plain(texts(call)), rtol=0.05, atol=0)
    record = record_of(model)
    assert any("in weighted: it was captured anew again" in told for told in record.breaks)
    low = [record.runs[i] for i, plan in enumerate(record.plans) if plan.converts]
    assert low == [MAX_CAPTURES]  # the network's graph


class GoesOn(OfTexts):
    """In float32 up to a break, and not behind it."""

    def forward(self, texts: list[str]) -> Tensor:
        torch._dynamo.graph_break()
        return self.computed(texts).square().mean()

    def computed(self, texts: list[str]) -> Tensor:
        weights = self.network.words.weight * sum(int(word) for word in texts[0].split())
        torch._dynamo.graph_break()
        return self.network.layer(weights)


def test_code_is_not_left_that_goes_on_in_low_precision() -> None:
    model = amp_graph.convert(GoesOn(), policy="bfloat16")
    for call in range(MAX_CAPTURES):
        model(texts(call)).backward()
    record = record_of(model)
    assert not any("captured anew" in told for told in record.breaks)
    assert [record.runs[i] for i, p in enumerate(record.plans) if p.has_low] == [MAX_CAPTURES]


class OfSeveral(nn.Module):
    """Parts of one class, some of which compute in low precision, called where nothing is captured
    as a whole."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(layer) for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            torch._dynamo.graph_break()
            x = part(x)
        return x


class Part(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


def test_code_is_not_left_that_some_parts_have_in_low_precision() -> None:
    others = [nn.Softmax(1), nn.LayerNorm(16), nn.Softplus(), nn.LogSoftmax(1), nn.Softmin(1)]
    layers = [nn.Linear(16, 16), *others, nn.Linear(16, 16, bias=False)]
    model = amp_graph.convert(OfSeveral(layers), policy="bfloat16")
    for _ in range(3):
        model(torch.randn(4, 16)).sum().backward()
    assert not any("captured anew" in told for told in record_of(model).breaks)
    runs = [record_of(model).runs[i] for i, p in enumerate(amp_graph.plans(model)) if p.has_low]
    assert runs == [3, 3]


class Computes(OfTexts):
    """Reads texts in code that computes as well; `layers` behind it are the same in each call."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))
        self.dtypes: list[torch.dtype] = []

    def prepare(self, texts: list[str]) -> Tensor:
        torch._dynamo.graph_break()
        words = self.network.words.weight * len(texts[0])
        return (words @ words.T)[tokenized(texts)] @ words

    @torch._dynamo.disable
    def look_at(self, x: Tensor) -> None:
        self.dtypes.append(x.dtype)

    def forward(self, texts: list[str]) -> Tensor:
        x = self.prepare(texts)
        self.look_at(x)
        return self.layers(x).square().mean()


def test_a_piece_that_computes_is_left_before_all_of_the_model_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("amp_graph.capture.budget.LONG", math.inf)  # however slow the machine is
    model = amp_graph.convert(Computes(12), policy="bfloat16")
    plain, calls = copy.deepcopy(amp_graph.restore(copy.deepcopy(model))), 5 * MAX_CAPTURES
    with warnings.catch_warnings():
        warnings.simplefilter("error", amp_graph.ConversionWarning)
        for call in range(calls):
            counters.clear()
            loss = model(texts(call))
            loss.backward()
            assert call < calls - MAX_CAPTURES or not counters["frames"]["total"]
    torch.testing.assert_close(loss, plain(texts(calls - 1)), rtol=0.05, atol=0)
    record = record_of(model)
    assert any("in prepare: it was captured anew again" in told for told in record.breaks)
    assert {*model.dtypes[-MAX_CAPTURES:]} == {torch.bfloat16}  # under autocast
    network = [record.runs[i] for i, plan in enumerate(record.plans) if plan.operators > 12]
    assert sum(network) == calls


def test_a_piece_that_is_most_of_a_model_is_not_left_alone() -> None:
    model = amp_graph.convert(Computes(0), policy="bfloat16")
    with pytest.warns(amp_graph.ConversionWarning, match="captured anew again and again"):
        for call in range(2 * MAX_CAPTURES):
            model(texts(call))
    assert "in prepare" not in str(record_of(model).breaks)
