"""Why and where a graph ends is told in words, also where Dynamo cannot go on behind that place."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import amp_graph
from amp_graph import ConversionWarning
from amp_graph.dynamo_changes import told_breaks

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning"),
]


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.rows = nn.Linear(8, 8), nn.Linear(8, 8), 4
        self.register_buffer("is_scaled", torch.tensor(True))


class TakesAGradient(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        loss = self.second(self.first(x)).square().mean()
        try:
            weight = self.weight(loss)
        except RuntimeError:
            weight = torch.zeros(())
        return loss * weight

    def weight(self, loss: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(loss, self.second.weight, retain_graph=True)
        return found.norm()


class ComputesWithADrawnNumber(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        rows = random.Random(0).randint(1, 3)
        return self.second(torch.cat([hidden, hidden.repeat(self.rows - rows, 1)]))


class IteratesOverATensor(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        for row in torch.unique_consecutive((x[:, 0] > 0).long()):
            hidden = self.second(hidden) + row
        return hidden


class ComparesASize(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        hidden, count = self.first(x), len((x > 0).nonzero())
        try:
            if count > 5:
                hidden = hidden * 2
        finally:
            self.calls = 1
        return self.second(hidden)


BEHIND = {
    TakesAGradient: r"torch.autograd.grad\(loss.*: a gradient is taken there$",
    ComputesWithADrawnNumber: r".*self.rows - rows.*: Python computes with .* number that it drew",
    IteratesOverATensor: "for row in .*: Python needs a number or a size that depends on",
    ComparesASize: "if count > 5: Python branches on a number or a size that depends on",
}


def breaks_of(model: nn.Module) -> tuple[str, ...]:
    amp_graph.convert(model, policy="bfloat16")
    model(torch.randn(4, 8))
    return tuple(amp_graph.explain(model).data.breaks)


@pytest.mark.parametrize("kind", BEHIND)
def test_what_dynamo_cannot_go_on_behind_is_told(kind: type[TwoLayers]) -> None:
    told = breaks_of(kind())
    line = re.compile(rf"test_told_breaks.py:\d+, (\(found,\) = )?{BEHIND[kind]}")
    assert any(map(line.match, told)), told
    assert not any("TORCH_LOGS" in each for each in told)


def test_of_another_dynamo_that_it_is_unknown_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told_breaks, "InstructionTranslatorBase", object)
    monkeypatch.setattr(told_breaks, "OutputGraph", object)
    (told,) = breaks_of(ComparesASize())
    assert told.endswith(
        "try: something in it cannot be captured, TORCH_LOGS=graph_breaks tells what"
    )


class BranchesOnABuffer(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.is_scaled.all():
            hidden = hidden * 2
        return self.second(hidden)


class AsksForAGradient(TwoLayers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x).detach()
        hidden.requires_grad_()
        return self.second(hidden), hidden


class KeepsAGradient(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden.retain_grad()
        return self.second(hidden)


class DrawsHowOften(TwoLayers):
    def forward(self, x: Tensor, turns: int | None = None) -> Tensor:
        for _ in range(turns or random.Random(0).randint(1, 3)):
            x = self.first(x)
        return x


def test_a_number_that_is_drawn_in_front_of_all_is_told() -> None:
    model = amp_graph.convert(DrawsHowOften(), policy="bfloat16")
    model(torch.randn(4, 8))
    (told,) = amp_graph.explain(model).data.breaks
    assert "in forward: Python goes by what cannot be captured, such as a number" in told


class DrawsWithNumPy(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        share = np.random.uniform(0.2, 0.8)
        return self.second(share * hidden)


class PermutesWithNumPy(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        order = np.random.permutation(len(x))
        return self.second(hidden[order])


AT = {
    DrawsWithNumPy: "share = np.random.uniform(0.2, 0.8): a random number of NumPy's",
    PermutesWithNumPy: "order = np.random.permutation(len(x)): it calls a function of NumPy's",
    BranchesOnABuffer: "if self.is_scaled.all(): Python branches on the numbers in a tensor",
    AsksForAGradient: "hidden.requires_grad_(): a value that is computed there is told to require",
    KeepsAGradient: "hidden.retain_grad(): the gradient of a value is kept there",
}


@pytest.mark.parametrize("kind", AT)
def test_no_break_is_told_of_in_names_of_dynamo(kind: type[TwoLayers]) -> None:
    (told,) = breaks_of(kind())
    assert AT[kind] in told


def test_that_it_depends_on_data_is_told_where_nothing_of_a_model_is_captured() -> None:
    looks = nn.AdaptiveLogSoftmaxWithLoss(8, 20, cutoffs=[5, 10])
    model = amp_graph.convert(looks, policy="bfloat16")
    with pytest.warns(ConversionWarning, match=r"nothing is captured .*: Python branches on a num"):
        model(torch.randn(4, 8), torch.tensor([0, 1, 2, 3]))
    assert amp_graph.plans(model)[0].autocast


class RefusesCompilers(nn.Module):
    """Like the collectives with gradients of `torch.distributed.nn`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            raise RuntimeError("gather is not supported under torch.compile; use another")
        return self.layer(x)


def test_what_a_model_raises_only_while_it_is_captured_is_told() -> None:
    model = amp_graph.convert(RefusesCompilers(), policy="bfloat16")
    raised = r"it raises RuntimeError\('gather is not supported .*'\) while it is captured"
    with pytest.warns(ConversionWarning, match=rf"test_told_breaks.py:\d+, .*: {raised}"):
        model(torch.randn(4, 8))
    assert amp_graph.plans(model)[0].autocast
