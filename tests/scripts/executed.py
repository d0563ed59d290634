"""A program held in a string and executed in a namespace of its own, as some launchers do."""

PROGRAM = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.layer(x)) + x


torch.manual_seed(0)
net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
x = torch.randn(32, 8)
for step in range(20):
    loss = (net(x) - x.roll(1, 1)).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"final loss {loss.item():.6f}")
"""

exec(compile(PROGRAM, "<program>", "exec"), {"__name__": "__main__"})
