"""Models in many graphs, of which most hold nothing that could be low."""

from __future__ import annotations

import copy

import pytest
import torch
from nets import low_share
from torch import Tensor, nn

import amp_graph
from amp_graph import Policy

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Suppresses(nn.Module):
    """A detector that looks which boxes are left, in a loop over what overlaps (NMS)."""

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


def test_graphs_in_which_nothing_is_low_do_not_count(recwarn) -> None:
    torch.manual_seed(0)
    plain, x = Suppresses(), torch.randn(20, 8)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for _ in range(4):
        assert model(x).shape == plain(x).shape == (20,)
    assert low_share(model, x) == 1
    said = [str(w.message) for w in recwarn.list if "no longer captured" in str(w.message)]
    assert (
        len(said) == 1
        and "operators for each, counting graphs in which something is low" in said[0]
    )


@pytest.mark.parametrize("removed", [(("allow", "linear"),), ()])
def test_what_is_to_be_in_float32_stays_there(
    removed: tuple[tuple[str, str], ...], recwarn
) -> None:
    """By a policy that says so, or since nothing could be low."""
    torch.manual_seed(0)
    plain, x = Suppresses(), torch.randn(20, 8)
    if not removed:
        plain.features = nn.LayerNorm(8)
    model = amp_graph.convert(copy.deepcopy(plain), policy=Policy("bfloat16", removed=removed))
    for _ in range(4):
        assert torch.equal(model(x), plain(x))
    assert not any("no longer captured" in str(w.message) for w in recwarn.list)
