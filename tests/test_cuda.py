"""What only a CUDA device can show. Run with `pytest -m cuda`; not yet measured on one."""

from __future__ import annotations

import copy

import pytest
import torch
from nets import Net, low_share
from torch import nn

import amp_graph

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [None, "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (Net, (16, 8)),
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), (4, 3, 16, 16)),
        (lambda: nn.LSTM(8, 8, batch_first=True), (4, 5, 8)),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), (5, 4, 8)),
    ],
    ids=["mlp", "conv", "lstm", "transformer"],
)
def test_forward_and_backward(make, shape, dtype) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = make().cuda()
    model = amp_graph.convert(copy.deepcopy(plain), policy=dtype)
    x = torch.randn(shape, device="cuda")
    results = [m(x)[0] if isinstance(m, nn.LSTM) else m(x) for m in (plain, model)]
    for result in results:
        assert result.dtype is torch.float32
        result.square().mean().backward()
    torch.testing.assert_close(results[1], results[0], rtol=3e-2, atol=3e-2)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert q.grad.dtype is torch.float32
        assert (q.grad - p.grad).norm() <= 0.05 * p.grad.norm() + 1e-3
    plans = amp_graph.plans(model)
    assert all(plan.fallback is None for plan in plans)
    assert plans[0].dtype is (torch.bfloat16 if dtype == "bfloat16" else torch.float16)
    assert low_share(model, x) == 1


def test_a_model_moved_after_conversion_follows_its_device() -> None:
    torch._dynamo.reset()
    model = amp_graph.convert(Net())
    model(torch.randn(4, 8))
    model.cuda()
    assert low_share(model, torch.randn(4, 8, device="cuda")) == 1
    assert [plan.dtype for plan in amp_graph.plans(model)] == [torch.bfloat16, torch.float16]


def test_fused_steps_do_not_wait_for_the_device() -> None:
    torch._dynamo.reset()
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    policy = amp_graph.Policy("float16", loss_scale=amp_graph.LossScale(2.0**10))
    amp_graph.convert(model, optimizer, policy=policy)
    x = torch.randn(16, 8, device="cuda")
    told = []
    try:
        for step in range(8):
            if step == 3:  # captured, and the optimizer has state
                torch.cuda.set_sync_debug_mode("error")
            model(x * torch.inf if step == 5 else x).square().mean().backward()
            told.append(optimizer.step())
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [bool(stepped) for stepped in told] == [step != 5 for step in range(8)]


def test_a_foreach_write_into_gradients_is_seen() -> None:
    """It raises their version on CUDA too."""
    torch._dynamo.reset()
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    policy = amp_graph.Policy("float16", loss_scale=amp_graph.LossScale(2.0**10))
    amp_graph.convert(model, optimizer, policy=policy)
    for factor in (1.0, torch.inf, 1.0):
        optimizer.zero_grad()
        model(torch.randn(16, 8, device="cuda")).square().mean().backward()
        torch._foreach_mul_([p.grad for p in model.parameters()], factor)
        assert optimizer.step() is (factor == 1.0)
