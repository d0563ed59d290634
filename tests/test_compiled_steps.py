"""Optimizers whose `step` the user compiles."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.optim import SGD, AdamW, Optimizer
from training import Mlp, X, overflow, scaled

import amp_graph
from amp_graph import Policy

POLICIES = {
    "scaled": scaled(2.0**8),
    "kept": Policy("bfloat16", refresh_weights="on_change"),
}
OPTIMIZERS: dict[str, Any] = {
    "AdamW fused": lambda p: AdamW(p, lr=0.1, fused=True),
    "SGD foreach": lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9),
}
STEPS, OVERFLOWS = 8, (3, 5)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("is_given", [True, False], ids=["given", "found"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_trains_as_uncompiled(policy: Policy, is_given: bool, make: Any) -> None:
    plain = Mlp()

    def trained(compiles: bool) -> tuple[list[Tensor], list[int]]:
        model = copy.deepcopy(plain)
        optimizer: Optimizer = make(model.parameters())
        amp_graph.convert(model, optimizer if is_given else None, policy=policy)
        step = torch.compile(optimizer.step, backend="eager") if compiles else optimizer.step
        seen = []
        for n in range(STEPS):
            optimizer.zero_grad()
            model(X).square().mean().backward()
            if n in OVERFLOWS and amp_graph.scale_of(model) is not None:
                overflow(model)
            step()
            seen.append(counters["frames"]["total"])
        return [*model.parameters()], seen

    (compiled, seen), (expected, _) = trained(True), trained(False)
    for found, reference in zip(compiled, expected, strict=True):
        torch.testing.assert_close(found, reference, rtol=1e-6, atol=1e-7)
    # Nothing is compiled anew; unless a step could not be stopped and was undone.
    until = STEPS if is_given else OVERFLOWS[0]
    assert seen[1:until] == [seen[1]] * (until - 1)
