"""Divergences of distributions in a model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import Independent, Normal, kl, kl_divergence
from training import twins
from two_layers import Two, X

from amp_graph.convert import record_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Drawn(Normal):
    """Of no function of its own."""


class Variational(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        q = Drawn(h, torch.ones_like(h))
        prior = Normal(torch.zeros_like(h), torch.ones_like(h))
        either = kl_divergence(q, prior).sum(-1)
        both = kl_divergence(Independent(q, 1), Independent(prior, 1))
        return self.b(h) + either[:, None] - both[:, None] / 2


def test_a_divergence_ends_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kl, "_KL_MEMOIZE", {})  # nobody asked yet
    plain, model = twins(Variational(), "bfloat16")
    outputs = [model(X) for _ in range(2)]
    for y in outputs:
        torch.testing.assert_close(y, plain(X), rtol=0.05, atol=0.2)
    assert not record_of(model).breaks and len(record_of(model).plans) == 1


class Unknown(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        return kl_divergence(Normal(h, 1.0), Independent(Normal(h, 1.0), 1))


def test_a_divergence_that_nobody_wrote_raises() -> None:
    _, model = twins(Unknown(), "bfloat16")
    with pytest.raises(NotImplementedError, match="No KL"):
        model(X)
