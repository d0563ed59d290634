"""One rank of a run under FullyShardedDataParallel; test_distributed_fsdp1 starts two of them.
Prints a line per check that holds.

torchrun --nproc-per-node 2 distributed_fsdp1.py
"""

from __future__ import annotations

import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import amp_graph
from amp_graph.convert import record_of

STEPS, OVERFLOW_AT = 4, 2
WAYS = ("adam", "fused", "closure", "by hand", "grad scaler", "convert inside")
NO_PART = "a rank without a gradient"
TOLD = "what to pass is told, and no place in Python's library"


class Net(nn.Module):
    """A gradient of the last row of `last` alone, of which rank 1 has all, can overflow."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x):
        h = torch.relu(self.first(x))
        return self.last(h), self.last(h.detach())


class One(nn.Module):
    """A single number, in the part of rank 0."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return self.inner(x)


def sharded(net: nn.Module, use_orig_params: bool = True) -> nn.Module:
    return FullyShardedDataParallel(
        net, use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )


def tell_of_flat() -> None:
    """Of models of one class, first with parameters of which Dynamo captures nothing."""
    for is_captured in (False, True):
        model = amp_graph.convert(sharded(Net(), is_captured), policy="bfloat16")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", amp_graph.ConversionWarning)
            for _ in range(3):
                sum(each.sum() for each in model(torch.ones(4, 16))).backward()
        told = " ".join([str(w.message) for w in caught] + record_of(model).breaks)
        assert ("pass use_orig_params=True" in told) is not is_captured, told
        assert any(plan.low for plan in amp_graph.plans(model)) is is_captured
        assert not any(file in told for file in ("typing.py", "weakref.py")), told
    print(TOLD, flush=True)


def train(way: str, policy: amp_graph.Policy) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = Net()
    if way == "convert inside":
        net = amp_graph.convert(net, policy=policy)
    model = sharded(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=way == "fused")
    if way != "convert inside":
        net = amp_graph.convert(model, policy=policy)
    scaler = amp_graph.GradScaler(init_scale=2.0) if way == "grad scaler" else None
    torch.manual_seed(rank)
    for step in range(STEPS):
        x, before = torch.randn(4, 16), [p.detach().clone() for p in model.parameters()]

        def backward(x=x, overflows=step == OVERFLOW_AT):
            optimizer.zero_grad()
            whole, row = model(x)
            loss = whole.square().mean()
            if overflows:
                loss = loss + row[:, -1].square().sum() * float("inf")
            loss.backward()
            return loss

        if way == "closure":
            optimizer.step(backward)
        else:
            backward()
            bad = any(not p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
            assert bad is (step == OVERFLOW_AT and rank == 1), (step, bad)
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            elif way != "by hand" or amp_graph.has_finite_gradients(model):
                optimizer.step()
        moved = any(not torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True))
        assert moved is (step != OVERFLOW_AT), (way, step, moved)
    if scaler is None:
        assert amp_graph.scale_of(net).get_scale() == 2.0**9
    else:
        assert scaler.get_scale() == 1.0
    print(f"{way}: skipped together", flush=True)


def train_one(policy: amp_graph.Policy) -> None:
    torch.manual_seed(0)
    model = sharded(One())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    amp_graph.convert(model, optimizer, policy=policy)
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        (model(torch.ones(1, 1)) * factor).sum().backward()
        (p,) = model.parameters()
        assert (p.grad is None) is (dist.get_rank() == 1)
        assert optimizer.step() is (factor == 1.0)
    assert amp_graph.step_counts(optimizer) == amp_graph.StepCounts(1, 1)
    print(NO_PART, flush=True)


def main() -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    policy = amp_graph.Policy("float16", loss_scale=amp_graph.LossScale(2.0**10))
    tell_of_flat()
    for way in WAYS:
        train(way, policy)
    train_one(policy)
    # As in distributed_training.
    store.set(f"done {rank}", "")
    store.wait([f"done {r}" for r in range(ranks)])
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
