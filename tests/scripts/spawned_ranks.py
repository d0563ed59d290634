"""DistributedDataParallel in two processes that torch.multiprocessing.spawn starts."""

import atexit
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank, ranks, file):
    store = dist.FileStore(file, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    x = torch.randn(128, 16)
    y = x.cumsum(1)[:, -1:]
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(24):
        rows = slice(step % 4 * 32 + rank, (step % 4 + 1) * 32, ranks)
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        with torch.no_grad():
            print(f"final loss {nn.functional.mse_loss(model.module(x), y).item():.6f}", flush=True)
    # gloo may hang in a last collective, also a barrier, if its peer is gone after (torch 2.13).
    store.set(f"done {rank}", "")
    store.wait([f"done {r}" for r in range(ranks)])
    dist.destroy_process_group()
    # gloo's threads sometimes abort the interpreter's own exit (torch 2.13, pytorch issue 190489).
    atexit._run_exitfuncs()
    os._exit(0)


if __name__ == "__main__":
    torch.multiprocessing.spawn(train, (2, f"{sys.argv[1]}/store"), nprocs=2)
    print("joined")
