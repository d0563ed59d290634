"""Plans for CUDA, made and checked without one: whatever the level, no graph is left as captured.

scripts/cuda_plans.py does the same for every model of the zoo.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import zoo
from cuda_graphs import on_cuda
from grappler import captured_plans
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from amp_graph.backend.rewrite import rewrite
from amp_graph.ir import Color
from amp_graph.levels import Level
from amp_graph.policy import Policy

pytestmark = pytest.mark.usefixtures("whole_models")
CASES = {case.name: case for case in zoo.cases()}
NAMES = "convnet residual unet lstm gru attention checkpointed own_autocast gpt2 t5 bert swin clip"


@pytest.mark.parametrize("name", NAMES.split())
def test_every_level_passes_all_checks(name: str) -> None:
    case = CASES[name]
    for captured, _ in captured_plans(case.make(), *case.batch(0, 0), "bfloat16"):
        moved = on_cuda(captured)
        for dtype, level in itertools.product(("float16", "bfloat16"), Level):
            policy = Policy(dtype, level=level.value)
            _, plan = rewrite(moved, policy, policy.load_lists())
            for part in plan.parts():
                assert part.fallback is None
                allowed = {n for n, p in part.paints.items() if p.color is Color.ALLOW}
                assert allowed <= part.low


@pytest.mark.parametrize("half", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_a_constant_on_the_cpu_leaves_streams_narrow(half: float | Tensor) -> None:
    def stream(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        for _ in range(2):
            x = x + F.linear(F.layer_norm(x, (64,), scale), w) * half
        return F.linear(x, w)

    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(s, device="cuda") for s in ((8, 64), (64, 64), (64,))]
        captured = make_fx(stream, pre_dispatch=True)(*inputs)
    policy = Policy("bfloat16")
    _, plan = rewrite(captured, policy, policy.load_lists())
    assert {"add", "add_1"} <= plan.low


def test_so_do_indices_on_the_cpu() -> None:
    def stream(x: Tensor, w: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(2):
            x = x + F.linear(F.layer_norm(x, (64,)), w)
        return F.linear(x, w), lengths.cumsum(0)

    with FakeTensorMode():
        inputs = [torch.empty(s, device="cuda") for s in ((8, 64), (64, 64))]
        captured = make_fx(stream, pre_dispatch=True)(*inputs, torch.ones(3, dtype=torch.int64))
    policy = Policy("bfloat16")
    _, plan = rewrite(captured, policy, policy.load_lists())
    assert {"add", "add_1"} <= plan.low
