"""A convolutional net in the layout of PyTorch's own MNIST example."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.norm = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.dropout = nn.Dropout(0.1)
        self.fc = nn.Linear(64, 4)

    def forward(self, x):
        x = F.relu(self.norm(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return F.log_softmax(self.fc(self.dropout(torch.flatten(x, 1))), dim=1)


def train(args, model, loader, optimizer, epoch):
    model.train()
    for batch, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch * len(data)}]\tLoss: {loss.item():.6f}")


def test(model, loader):
    model.eval()
    loss = 0.0
    with torch.no_grad():
        for data, target in loader:
            loss += F.nll_loss(model(data), target, reduction="sum").item()
    return loss / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--log-interval", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(1)
    images = torch.rand(128, 1, 8, 8) * 0.3
    labels = torch.randint(4, (128,))
    for image, label in zip(images, labels):
        image[0, :, 2 * label : 2 * label + 2] += 0.5
    data = TensorDataset(images, labels)
    model = Net()
    optimizer = optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(1, args.epochs + 1):
        train(args, model, DataLoader(data, batch_size=32, shuffle=True), optimizer, epoch)
    print(f"final loss {test(model, DataLoader(data, batch_size=64)):.6f}")


if __name__ == "__main__":
    main()
