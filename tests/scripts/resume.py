"""Saves a checkpoint every few steps. The first run is killed; the second goes on from there."""

import os
import signal
import sys

import torch
from torch import nn

CHECKPOINT = sys.argv[1]
STEPS, KILLED_AT = 24, 12

torch.manual_seed(0)
x = torch.randn(64, 16)
y = torch.sin(x.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
start = 0
if os.path.exists(CHECKPOINT):
    state = torch.load(CHECKPOINT, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    start = state["step"]
    print("resumed at step", start, flush=True)

for step in range(start, STEPS):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if (step + 1) % 6 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "step": step + 1}, CHECKPOINT)
    if start == 0 and step + 1 == KILLED_AT:
        print("killed", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
print(f"final loss {loss.item():.6f}")
