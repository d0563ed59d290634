"""nn.DataParallel, where no GPU is to be seen."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.DataParallel(nn.Sequential(nn.Linear(10, 40), nn.ELU(), nn.Linear(40, 3)))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()
x = torch.randn(96, 10)
y = x[:, :3].argmax(1)
for step in range(30):
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("saved", sorted(model.state_dict()))
print(f"final loss {loss.item():.6f}")
