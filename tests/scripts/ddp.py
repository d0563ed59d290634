"""DistributedDataParallel under torchrun, with a sampler and with no_sync for accumulation."""

import atexit
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    x = torch.randn(128, 16)
    data = TensorDataset(x, x.cumsum(1)[:, -1:])
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for step, (a, b) in enumerate(loader):
            if step % 2 == 0:
                with model.no_sync():
                    nn.functional.mse_loss(model(a), b).div(2).backward()
                continue
            nn.functional.mse_loss(model(a), b).div(2).backward()
            optimizer.step()
            optimizer.zero_grad()
    total = sum(p.detach().double().sum() for p in model.parameters())
    totals = [torch.zeros((), dtype=torch.float64) for _ in range(ranks)]
    dist.all_gather(totals, total)
    if rank == 0:
        print("ranks agree", all(torch.equal(t, total) for t in totals), flush=True)
        with torch.no_grad():
            print(
                f"final loss {nn.functional.mse_loss(model.module(x), data[:][1]).item():.6f}",
                flush=True,
            )
    # gloo may hang in a last collective if its peer is gone right after (torch 2.11, 2.13).
    store.set(f"done {rank}", "")
    store.wait([f"done {r}" for r in range(ranks)])
    dist.destroy_process_group()
    # gloo's threads sometimes abort the interpreter's own exit (torch 2.13, pytorch issue 190489).
    atexit._run_exitfuncs()
    os._exit(0)


if __name__ == "__main__":
    main()
