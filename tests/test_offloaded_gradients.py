"""An overflow of gradients that lie on the CPU is told where ranks communicate."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from amp_graph.gradients.found_inf import found_inf


class Part(Tensor):
    """A gradient as `fully_shard` makes one, offloaded to the CPU: part of a DTensor."""

    device_mesh = SimpleNamespace(device_type="cuda", ndim=1, get_group=lambda dimension: None)

    def to_local(self) -> Tensor:
        return self.as_subclass(Tensor)


def test_an_overflow_of_offloaded_gradients_is_told_where_ranks_communicate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL takes no tensor that is on the CPU."""
    sent_to: list[torch.device] = []
    monkeypatch.setattr(
        "amp_graph.gradients.shards.sent", lambda flag, device: sent_to.append(device) or flag
    )
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([1.0, math.inf, 2.0]).as_subclass(Part)
    assert found_inf([parameter]) == 1 and sent_to == [torch.device("cuda")]
