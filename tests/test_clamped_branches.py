"""Branches that bring back what is not finite, as in each layer of a detector of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import DetrConfig
from transformers.models.detr.modeling_detr import DetrEncoderLayer

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def all_finite(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        clamp_value = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-clamp_value, max=clamp_value)
    return x


def any_infinite(x: Tensor) -> Tensor:
    if torch.isinf(x).any() or torch.isnan(x).any():
        bound = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-bound, max=bound)
    return x


def infinite_alone(x: Tensor) -> Tensor:
    if torch.isinf(x).any():
        bound = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-bound, max=bound)
    return x


def narrow(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        bound = 1.0
        x = torch.clamp(x, min=-bound, max=bound)
    return x


def another(x: Tensor) -> Tensor:
    y = x + 1
    if not torch.isfinite(x).all():
        bound = torch.finfo(x.dtype).max - 1000
        y = torch.clamp(y, min=-bound, max=bound)
    return y


def crossed(x: Tensor) -> Tensor:
    y = x + 1
    if not torch.isfinite(x).all():
        bound = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(y, min=-bound, max=bound)
    return x


def counting(x: Tensor) -> Tensor:
    n = 0
    if not torch.isfinite(x).all():
        bound = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-bound, max=bound)
        n = n + 1
    return x * 2 if n else x


def otherwise(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        bound = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-bound, max=bound)
    else:
        x = x * 2
    return x


def double(x: Tensor) -> Tensor:
    return all_finite(x.double()).float()


def half(x: Tensor) -> Tensor:
    return all_finite(x.half()).float()


def of_bound(x: Tensor) -> Tensor:
    bound = 5.0
    if not torch.isfinite(x).all():
        bound = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-bound, max=bound)
    return x * bound


def kept_elsewhere(x: Tensor) -> Tensor:
    y = x
    if not torch.isfinite(x).all():
        bound = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-bound, max=bound)
    x += 1
    return x + y


def kept_in_a_list(x: Tensor) -> Tensor:
    kept = [x]
    if not torch.isfinite(x).all():
        bound = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-bound, max=bound)
    x += 1
    return x + kept[0]


def of_a_view(x: Tensor) -> Tensor:
    whole = x * 1
    x = whole[:]
    if not torch.isfinite(x).all():
        bound = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-bound, max=bound)
    x += 1
    return x + whole


def asked_before(x: Tensor) -> Tensor:
    finite = torch.isfinite(x)
    x.masked_fill_(x < 0, -torch.inf)
    if not finite.all():
        bound = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-bound, max=bound)
    return x


def stored(x: Tensor) -> Tensor:
    finite = torch.isfinite(x).all()
    if not finite:
        bound = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-bound, max=bound)
    return x * finite.logical_not()


def not_numbers(x: Tensor) -> Tensor:
    if torch.isnan(x).any():
        bound = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-bound, max=bound)
    return x


def unrecorded(x: Tensor) -> Tensor:
    with torch.no_grad():
        if not torch.isfinite(x).all():
            bound = torch.finfo(x.dtype).max - 1000
            x = torch.clamp(x, min=-bound, max=bound)
    return x


def behind_other_questions(x: Tensor, a: None = None, b: None = None) -> Tensor:
    if a is not None:
        x = x + a
    if b is not None:
        x = x + b
    if not torch.isfinite(x).all():
        bound = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-bound, max=bound)
    return x


def answered(x: Tensor, a: None = None, b: None = None) -> Tensor:
    """Ends no graph, with or without what is changed here."""
    if a is not None:
        x = x + a
    if b is not None:
        x = x + b
    return x * torch.isfinite(x).all()


def twice(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        bound = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-bound, max=bound)
    x = x + 1
    if not torch.isfinite(x).all():
        bound = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-bound, max=bound)
    return x


CAPTURED = [all_finite, any_infinite, infinite_alone, double, twice]
CAPTURED += [behind_other_questions, answered, unrecorded]  # of what needs no gradient
ENDED = [narrow, another, crossed, counting, otherwise, half, of_bound, kept_elsewhere]
ENDED += [kept_in_a_list, of_a_view, asked_before, stored, not_numbers]


class Net(nn.Module):
    def __init__(self, bring_back: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.bring_back = nn.Linear(4, 4, bias=False), bring_back
        nn.init.eye_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.bring_back(x * 1) / 2)


INPUTS = [
    torch.tensor([[1.0, -2.0, 65000.0, 0.0]]),
    torch.tensor([[1.0, torch.inf, -torch.inf, 0.0]]),
    torch.tensor([[1.0, torch.nan, 0.0, 0.0]]),
    torch.tensor([[torch.finfo(torch.float32).max, 1.0, 0.0, 0.0]]),
]


@pytest.mark.parametrize("bring_back", CAPTURED + ENDED)
def test_values_are_those_of_the_model(bring_back: Callable[[Tensor], Tensor]) -> None:
    model = Net(bring_back)
    converted = amp_graph.convert(copy.deepcopy(model), policy="bfloat16")
    for x in INPUTS:
        with torch.autocast("cpu", torch.bfloat16):
            expected = model(x).float()
        torch.testing.assert_close(converted(x).float(), expected, equal_nan=True)
    assert (len(amp_graph.plans(converted)) == 1) == (bring_back in CAPTURED)


@pytest.mark.parametrize("bring_back", CAPTURED)
def test_gradients_are_those_of_the_model(bring_back: Callable[[Tensor], Tensor]) -> None:
    model = Net(bring_back)
    converted = amp_graph.convert(copy.deepcopy(model), policy="bfloat16")
    x = INPUTS[0].clone().requires_grad_()  # of the largest number some versions take no gradient
    found, expected = (torch.autograd.grad(m(x).sum(), x)[0] for m in (converted, model))
    torch.testing.assert_close(found, expected)


def test_what_is_given_stays_what_it_is() -> None:
    converted = amp_graph.convert(Given(), policy="bfloat16")
    x = torch.ones(2, 4)
    _, same = converted(x)
    assert same is x and bool((x == 3).all())


class Given(nn.Module):
    """Asks about what it was given, and returns and writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not torch.isfinite(x).all():
            bound = torch.finfo(x.dtype).max - 1000
            x = torch.clamp(x, min=-bound, max=bound)
        x += 2
        return self.layer(x), x


def test_a_detector_s_layer_is_one_graph_in_training() -> None:
    config = DetrConfig(d_model=16, encoder_attention_heads=2, encoder_ffn_dim=16, dropout=0.0)
    plain = DetrEncoderLayer(config).train()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    x, positions = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    expected, found = (m(x, None, positions) for m in (plain, model))
    assert (found - expected).norm() <= 0.01 * expected.norm()
    (plan,) = amp_graph.plans(model)
    assert not plan.fallback and any("clamp" in facts.op for facts in plan.facts.values())


class Detector(nn.Module):
    """Its labels are read behind the branch, and their sizes vary."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, labels: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        h = self.b(all_finite(self.a(x)))
        return h, self.count(labels)

    @torch.compiler.disable
    def count(self, labels: list[dict[str, Tensor]]) -> Tensor:
        return torch.cat([label["boxes"] for label in labels]).sum()


def test_what_is_not_read_yet_stays_unread() -> None:
    torch.manual_seed(0)
    model = amp_graph.convert(Detector().train(), policy="bfloat16")
    x = torch.randn(4, 8)
    for counts in ((2, 3), (4, 0), (1, 5), (0, 2)):
        labels = [{"boxes": torch.ones(count, 4)} for count in counts]
        assert model(x, labels)[1] == 4 * sum(counts)
    assert len(amp_graph.plans(model)) == 1
