"""An encoder and a decoder with an optimizer each, in one model."""

import torch
from torch import nn


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 6))
        self.decoder = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 24))

    def forward(self, x):
        return self.decoder(self.encoder(x))


torch.manual_seed(0)
data = torch.randn(64, 5) @ torch.randn(5, 24)
model = AutoEncoder()
optimizers = [
    torch.optim.AdamW(model.encoder.parameters(), lr=3e-3),
    torch.optim.SGD(model.decoder.parameters(), lr=3e-2),
]
for step in range(40):
    loss = nn.functional.mse_loss(model(data), data)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
print("code", tuple(model.encoder(data).shape))
print(f"final loss {nn.functional.mse_loss(model(data), data).item():.6f}")
