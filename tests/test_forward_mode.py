"""Forward-mode AD, in which a converted model runs its own code."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from training import distance, twins
from two_layers import BFLOAT16, POLICIES, X

from amp_graph import Policy

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_forward_mode(policy: Policy) -> None:
    plain, model = twins(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), policy)
    model(X).sum().backward()
    tangents = []
    for each in (plain, model):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(X, X.cos())
            tangents.append(forward_ad.unpack_dual(each(dual)).tangent)
    assert distance(tangents[1], tangents[0]) <= BFLOAT16


def test_forward_mode_runs_the_model_once_also_where_autocast_fails() -> None:
    layers = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.LayerNorm(8), nn.Linear(8, 4)
    plain, model = twins(nn.Sequential(*layers), Policy("bfloat16"))
    for each in (plain, model):
        for _ in range(2):
            with forward_ad.dual_level():
                each(forward_ad.make_dual(X, X.cos()))
    assert model[1].num_batches_tracked == 2
    assert torch.equal(model[1].running_mean, plain[1].running_mean)
