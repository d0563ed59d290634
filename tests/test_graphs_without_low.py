"""Models in many graphs, of which most hold nothing that could be low."""

from __future__ import annotations

import copy
import re
import sys
from typing import Any

import pytest
import torch
from nets import low_share
from torch import Tensor, nn

import amp_graph
from amp_graph import Policy
from amp_graph.calls.model_graphs import _how_few
from amp_graph.convert import record_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Suppresses(nn.Module):
    """A detector that looks which boxes are left, in a loop over what overlaps (NMS). From Python
    3.12 on, Dynamo leaves a frame with this loop to Python, and captures what that calls."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        found = self.features(x)
        corners, scores = found[:, :4].sigmoid(), found[:, 4].sigmoid()
        kept, left = [], scores.argsort(descending=True)
        while left.numel() > 0:
            kept.append(left[:1])
            left = left[1:][self.overlap(corners[left[0]], corners[left[1:]]) < 0.99]
        return scores[torch.cat(kept)] * corners[torch.cat(kept)].sum(1)

    def overlap(self, one: Tensor, others: Tensor) -> Tensor:
        low = torch.maximum(one[:2], others[:, :2])
        high = torch.minimum(one[:2] + one[2:], others[:, :2] + others[:, 2:])
        both = (high - low).clamp(min=0).prod(1)
        return both / (one[2:].prod() + others[:, 2:].prod(1) - both)


class LeftToPython(Suppresses):
    """By any version, and with it what is low."""

    def forward(self, x: Tensor) -> Tensor:
        found = self.features(x)
        corners, scores = found[:, :4].sigmoid(), found[:, 4].sigmoid()
        kept, left = [], scores.argsort(descending=True)
        for _ in range(len(x)):
            if left.numel() == 0:
                break
            kept.append(left[:1])
            left = left[1:][self.overlap(corners[left[0]], corners[left[1:]]) < 0.99]
        return scores[torch.cat(kept)] * corners[torch.cat(kept)].sum(1)


@pytest.mark.parametrize("kind", [Suppresses, LeftToPython])
def test_graphs_in_which_nothing_is_low_do_not_count(kind: type[Suppresses], recwarn) -> None:
    torch.manual_seed(0)
    plain, x = kind(), torch.randn(20, 8)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for _ in range(4):
        assert model(x).shape == plain(x).shape == (20,)
    assert low_share(model, x) == 1
    said = [str(w.message) for w in recwarn.list if "no longer captured" in str(w.message)]
    if kind is LeftToPython or sys.version_info >= (3, 12):  # what is called in the loop is left
        assert "in overlap: it was captured anew" in str(record_of(model).breaks) and not said
        return
    assert len(said) == 1
    few = r"nothing in them is in low precision|have (less than one|\d\.\d) operators? for each"
    assert re.search(few, said[0])


def test_how_few_operators_there_are_is_said_in_words_where_it_is_none() -> None:
    assert _how_few(0) == "nothing in them is in low precision"
    assert " less than one operator for each" in _how_few(0.01)
    assert " 1.5 operators for each" in _how_few(1.5)


DENIES = {"allow": ["exp"], "deny": ["linear"]}


@pytest.mark.parametrize("kind", [Suppresses, LeftToPython])
@pytest.mark.parametrize("policy", [{"removed": (("allow", "linear"),)}, {"lists": DENIES}, {}])
def test_what_is_to_be_in_float32_stays_there(
    policy: dict[str, Any], kind: type[Suppresses], recwarn
) -> None:
    """By a policy that says so, or since nothing could be low; between graphs, too."""
    torch.manual_seed(0)
    plain, x = kind(), torch.randn(20, 8)
    if not policy:
        plain.features = nn.LayerNorm(8)
    model = amp_graph.convert(copy.deepcopy(plain), policy=Policy("bfloat16", **policy))
    for _ in range(4):
        assert torch.equal(model(x), plain(x))
    assert not any("no longer captured" in str(w.message) for w in recwarn.list)


class BehindOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    @torch._dynamo.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.parametrize(
    ("removed", "share"), [("convolution", 1), ("linear", 0), ("addmm", 0), ("conv2d", 0)]
)
def test_what_ran_between_graphs_tells_whether_autocast_does_as_the_policy(
    removed: str, share: float, recwarn
) -> None:
    """Of operators that PyTorch takes apart, as `conv2d`, nobody sees whether they ran."""
    policy = Policy("bfloat16", removed=(("allow", removed),))
    model, x = amp_graph.convert(BehindOne(), policy=policy), torch.randn(4, 8)
    model(x)
    assert low_share(model, x) == share
