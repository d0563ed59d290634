"""A DataLoader whose dataset runs a module, in workers started the way that is asked for."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __init__(self):
        self.augment = None

    def __len__(self):
        return 128

    def __getitem__(self, index):
        if self.augment is None:  # in the worker
            self.augment = nn.Linear(12, 12)
            nn.init.eye_(self.augment.weight)
            nn.init.zeros_(self.augment.bias)
        with torch.no_grad():
            x = self.augment(torch.randn(12, generator=torch.Generator().manual_seed(index)))
        return x, (x**2).sum().log()


def main():
    torch.manual_seed(0)
    way = sys.argv[1]
    loader = DataLoader(Squares(), batch_size=32, num_workers=1, multiprocessing_context=way)
    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with torch.no_grad():
        print("before training", model(torch.zeros(2, 12)).shape)
    for epoch in range(2):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
