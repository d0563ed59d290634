"""A GAN: two networks, two optimizers, one network's output into the other."""

import torch
from torch import nn

torch.manual_seed(0)


def discriminator():
    return nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


def generator():
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 8))


G, D = generator(), discriminator()
opt_g = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
ones, zeros = torch.ones(32, 1), torch.zeros(32, 1)
spread = torch.rand(8)

for step in range(30):
    real = torch.randn(32, 8) * spread + 1
    fake = G(torch.randn(32, 4))

    opt_d.zero_grad()
    d_loss = criterion(D(real), ones) + criterion(D(fake.detach()), zeros)
    d_loss.backward()
    opt_d.step()

    opt_g.zero_grad()
    g_loss = criterion(D(fake), ones)
    g_loss.backward()
    opt_g.step()
    if step % 10 == 0:
        print(f"[{step}] Loss_D: {d_loss.item():.4f} Loss_G: {g_loss.item():.4f}")
print(f"final loss {d_loss.item() + g_loss.item():.6f}")
