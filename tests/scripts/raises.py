"""Training that ends in an error of the script's own."""

import torch
from torch import nn


def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(steps):
        loss = model(torch.ones(4, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 3:
            print(f"final loss {loss.item():.6f}")
            model(torch.ones(4, 7))  # wrong width


torch.manual_seed(0)
train(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)), 5)
