"""How often the host waits for a number because of loss scaling, beside GradScaler.

Host reads are counted where Python asks for a number in a tensor; on an accelerator it would wait.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from counting import HostReads
from torch import nn
from torch.optim import SGD, Adam, AdamW
from training import Mlp, X, scaled

import amp_graph
from amp_graph import LossScale, Policy

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "no_other_scales")

MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "Adam fused": lambda p: Adam(p, lr=0.01, fused=True),
    "SGD fused": lambda p: SGD(p, lr=0.01, momentum=0.9, fused=True),
    "SGD fused, dampened": lambda p: SGD(p, lr=0.01, momentum=0.9, dampening=0.1, fused=True),
    "AdamW foreach": lambda p: AdamW(p, lr=0.01, foreach=True),
    "SGD": lambda p: SGD(p, lr=0.01, momentum=0.9),
}
STEPS = 6


def reads(model: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler) -> list[int]:
    """Host reads in each of some steps."""
    found = []
    for _ in range(STEPS):
        with HostReads() as counter:
            scaler.scale(model(X).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append(counter.count)
    return found


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("attached", [True, False], ids=["attached", "found"])
def test_host_reads_per_step(kind: str, attached: bool) -> None:
    model = Mlp()
    found: dict[str, list[int]] = {}
    for name in ("plain", "ours", "GradScaler"):
        twin = copy.deepcopy(model)
        optimizer = MAKE[kind](twin.parameters())
        if name == "ours":
            amp_graph.convert(twin, optimizer if attached else None, policy=scaled(2.0**10))
        scaler = torch.amp.GradScaler("cpu", 2.0**10, enabled=name == "GradScaler")
        found[name] = reads(twin, optimizer, scaler)
    own = found.pop("plain")  # of the optimizer, which reads its count of steps
    cost = {name: [a - b for a, b in zip(n, own, strict=True)] for name, n in found.items()}
    if "fused" in kind:
        # A dampened SGD cannot skip its first step by itself, and is not called if it is to; the
        # step in which an optimizer is found is looked into before it begins.
        first = 0 if attached and "dampened" not in kind else 1
        assert cost == {"ours": [first] + [0] * (STEPS - 1), "GradScaler": [0] * STEPS}
    else:
        assert cost == {"ours": [1] * STEPS, "GradScaler": [1] * STEPS}


def test_the_count_of_skips_is_read_only_when_it_could_have_reached_the_limit() -> None:
    model = Mlp()
    optimizer = MAKE["AdamW fused"](model.parameters())
    policy = Policy("float16", loss_scale=LossScale(2.0**10, abort_after=3))
    amp_graph.convert(model, optimizer, policy=policy)
    # A round ends with the next forward.
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert reads(model, optimizer, scaler) == [0, 0, 0, 1, 0, 0]
