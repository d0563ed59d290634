"""What only a CUDA device can show. `python -m pytest -m cuda` runs them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import pytest
import torch
from nets import Net, low_share
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import amp_graph
from amp_graph import Policy

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
    model = make().cuda()  # and no copy, in which the weights of an LSTM do not lie together
    model.load_state_dict(plain.state_dict())
    amp_graph.convert(model, policy=dtype)
    x = torch.randn(shape, device="cuda")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "RNN module weights")  # put together in each call
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


class Training:
    """A converted model and its whole training steps, on one batch that stays where it is."""

    def __init__(self, policy: Policy):
        torch.manual_seed(0)
        layers = [m for _ in range(3) for m in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
        model = nn.Sequential(*layers, nn.Linear(64, 8)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True, capturable=True)
        self.model, self.optimizer = amp_graph.convert(model, optimizer, policy=policy)
        self.x, self.y = torch.randn(32, 64, device="cuda"), torch.randn(32, 8, device="cuda")

    def step(self) -> None:
        F.mse_loss(self.model(self.x), self.y).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def captured(self) -> torch.cuda.CUDAGraph:
        """A CUDA graph of one step, after three that warm up."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.steps(3)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph

    def parameters(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    """An operation that makes the host wait for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


COMPILERS = [("eager", None), ("inductor", None), ("inductor", "reduce-overhead")]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("compiler", "options"), COMPILERS)
def test_the_host_never_waits_in_a_training_step(compiler, options, dtype) -> None:
    torch._dynamo.reset()
    training = Training(Policy(dtype, compiler=compiler, compiler_options=options))
    training.steps(5)
    with no_synchronisation():
        training.steps(3)


@pytest.mark.parametrize("loss_scale", ["dynamic", 1024.0])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_whole_step_is_captured_as_a_cuda_graph(dtype, loss_scale) -> None:
    torch._dynamo.reset()
    policy = Policy(dtype, loss_scale=loss_scale)
    eager, replayed = Training(policy), Training(policy)
    eager.steps(3 + 5)
    graph = replayed.captured()
    for _ in range(5):
        graph.replay()
    torch.testing.assert_close(replayed.parameters(), eager.parameters(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss_scale", ["dynamic", 1024.0])
def test_a_replayed_step_that_overflows_is_skipped(loss_scale) -> None:
    torch._dynamo.reset()
    training = Training(Policy("float16", loss_scale=loss_scale))
    graph = training.captured()
    graph.replay()
    before, batch = training.parameters(), training.x.clone()
    training.x.fill_(torch.inf)
    graph.replay()
    torch.testing.assert_close(training.parameters(), before, rtol=0, atol=0)
    training.x.copy_(batch)
    graph.replay()
    assert all(p.isfinite().all() for p in training.parameters())
    assert not torch.equal(training.parameters()[0], before[0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("options", [None, "reduce-overhead"])
def test_compiled_training_follows_eager(options, dtype) -> None:
    torch._dynamo.reset()
    counters.clear()
    eager = Training(Policy(dtype))
    compiled = Training(Policy(dtype, compiler="inductor", compiler_options=options))
    eager.steps(8)
    compiled.steps(8)
    torch.testing.assert_close(compiled.parameters(), eager.parameters(), rtol=2e-2, atol=4e-3)
    assert [p.uncompiled for p in amp_graph.plans(compiled.model)] == [None]
    assert counters["inductor"]["cudagraph_skips"] == 0


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
