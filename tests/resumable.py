"""A training script that can be killed at any moment and started again; see test_resume.py.

    python resumable.py FOLDER KIND STEPS

Writes a checkpoint after every step and says so on stdout. Overflows at some steps.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import amp_graph

OVERFLOWS = (1, 2, 7)
POLICY = amp_graph.Policy(
    "float16",
    loss_scale=amp_graph.LossScale(2.0**10, growth_interval=3, ceiling=2.0**12, hysteresis=2),
)
MAKE: dict[str, Any] = {
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "AdamW fused": lambda p: AdamW(p, lr=0.05, fused=True),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def one_step(model: nn.Module, optimizer: Optimizer, step: int) -> Any:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    (model(x) - 1).square().mean().backward()
    if step in OVERFLOWS:
        next(model.parameters()).grad.view(-1)[0] = torch.inf
    return optimizer.step()


def main(folder: Path, kind: str, steps: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Net()
    optimizer = MAKE[kind](model.parameters())
    scheduler = StepLR(optimizer, 3, 0.9)
    amp_graph.convert(model, optimizer, policy=POLICY)
    path, first = folder / "checkpoint.pt", 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        torch.set_rng_state(saved["random"])
        first = saved["step"] + 1
    for step in range(first, steps):
        if one_step(model, optimizer, step):
            scheduler.step()
        saved = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "random": torch.get_rng_state(),
            "step": step,
        }
        torch.save(saved, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)
        print("step", step, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
