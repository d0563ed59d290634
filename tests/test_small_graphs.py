"""Models that are cut into so many small graphs that entering them takes longer than they save."""

from __future__ import annotations

import copy

import pytest
import torch
from nets import low_share
from torch import Tensor, nn
from training import distance

import amp_graph
from amp_graph import Policy

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Solver(nn.Module):
    """Looks at what it has after each step, as solvers do that choose the next one."""

    def __init__(self, steps: int, depth: int = 1) -> None:
        super().__init__()
        self.steps = steps
        layers = (each for _ in range(depth) for each in (nn.Linear(8, 8), nn.Tanh()))
        self.slope = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.steps):
            x = x + self.step(x)
        return x

    def step(self, x: Tensor) -> Tensor:
        slope = self.slope(x)
        return slope if slope.abs().max() < 100 else slope / 100


def pair(policy: Policy | str, *given: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Solver(*given)
    return plain, amp_graph.convert(copy.deepcopy(plain), policy=policy)


@pytest.mark.parametrize(
    "policy",
    ["bfloat16", Policy("float16", loss_scale=2.0**8)],
    ids=["bfloat16", "float16"],
)
def test_they_run_under_autocast_and_say_so(policy: Policy | str, recwarn) -> None:
    plain, model = pair(policy, 24)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for _ in range(4):
        optimizer.zero_grad(), plain.zero_grad()
        model(X).mean().backward(), plain(X).mean().backward()
        assert optimizer.step() is not False
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert distance(p.grad, q.grad) < 0.05
    assert low_share(model, X) == 1 and model(X).dtype is torch.float32
    last = amp_graph.plans(model)[-1]
    assert last.autocast and "takes longer than it saves" in (last.fallback or "")
    said = [str(w.message) for w in recwarn.list if "no longer captured" in str(w.message)]
    assert len(said) == 1 and said[0].startswith("Solver is no longer captured and runs under")


@pytest.mark.parametrize(
    ("policy", "given"),
    [
        ("bfloat16", (4,)),
        ("bfloat16", (24, 8)),
        (Policy("bfloat16", keep_float32=("slope",)), (24,)),
    ],
    ids=["few", "large", "with a part that stays in float32"],
)
def test_others_stay_captured(policy: Policy | str, given: tuple[int, ...], recwarn) -> None:
    plain, model = pair(policy, *given)
    for _ in range(4):
        torch.testing.assert_close(model(X), plain(X), rtol=0.05, atol=0.05)
    assert not any("no longer captured" in str(w.message) for w in recwarn.list)
