"""Warm-up and cosine decay, parameter groups, a loss on a list of outputs."""

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 32)
        self.heads = nn.ModuleDict({"mean": nn.Linear(32, 1), "scale": nn.Linear(32, 1)})

    def forward(self, x):
        hidden = torch.nn.functional.silu(self.body(x))
        return {name: head(hidden) for name, head in self.heads.items()}


def nll(outputs, target):
    return nn.GaussianNLLLoss()(outputs["mean"], target, outputs["scale"].exp())


torch.manual_seed(0)
x = torch.randn(128, 16)
target = x[:, :1] * 2 + 0.1 * torch.randn(128, 1)
model = TwoHeads()
optimizer = torch.optim.AdamW(
    [
        {"params": model.body.parameters(), "weight_decay": 0.0},
        {"params": model.heads.parameters(), "lr": 1e-2},
    ],
    lr=5e-3,
)
steps = 40
schedule = LambdaLR(
    optimizer, lambda i: min(1, (i + 1) / 5) * 0.5 * (1 + math.cos(math.pi * i / steps))
)
for step in range(steps):
    loss = nll(model(x), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
print("last learning rates", [f"{group['lr']:.2e}" for group in optimizer.param_groups])
print(f"final loss {nll(model(x), target).item():.6f}")
