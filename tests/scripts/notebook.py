"""Cells as a notebook runs them: source text executed in one namespace."""

import sys
import types

CELLS = [
    """
import torch
from torch import nn
torch.manual_seed(0)
""",
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return x
""",
    """
net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
x = torch.randn(32, 8)
net(x).shape
""",
    """
for step in range(20):
    loss = (net(x) - x.roll(1, 1)).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "net = Net()  # the cell was run again",
    "net.load_state_dict(net.state_dict())",
    """
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(20):
    loss = (net(x) - x.roll(1, 1)).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"final loss {loss.item():.6f}")
""",
]

# IPython, too, makes the namespace of its cells the module __main__.
notebook = sys.modules["__main__"] = types.ModuleType("__main__")
for number, cell in enumerate(CELLS, 1):
    print(f"In [{number}]")
    exec(compile(cell, f"<cell {number}>", "exec"), notebook.__dict__)
