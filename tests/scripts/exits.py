"""Training that ends in an exit code."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Bilinear(6, 6, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
x = torch.randn(16, 6)
for step in range(5):
    loss = (model(x, x) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"final loss {loss.item():.6f}")
sys.exit(3)
