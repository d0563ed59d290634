"""What demo.py trains, and on what: a small ConvNet, and scikit-learn's handwritten digits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 64
Batches = DataLoader[tuple[Tensor, ...]]


class Residual(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        h = self.norm2(self.conv2(h))
        return F.relu(x + h)


class DigitNet(nn.Module):
    """Images (N, 1, 8, 8) -> scores (N, 10)."""

    def __init__(self, width: int):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.block1 = Residual(width)
        self.widen = nn.Conv2d(width, 2 * width, 3, padding=1, bias=False)
        self.widen_norm = nn.BatchNorm2d(2 * width)
        self.block2 = Residual(2 * width)
        self.classify = nn.Linear(2 * width * 2 * 2, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.stem(x)))
        h = F.max_pool2d(self.block1(h), 2)
        h = F.relu(self.widen_norm(self.widen(h)))
        h = F.max_pool2d(self.block2(h), 2)
        return self.classify(h.flatten(1))


def load(device: str) -> tuple[Batches, list[Tensor]]:
    """Training batches, shuffled alike in every run, and the images and labels of a quarter held
    out for testing, of scikit-learn's 1797 scans of handwritten digits."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(digits.target, dtype=torch.int64)
    train, test = train_test_split(
        torch.arange(len(labels)).numpy(), test_size=0.25, stratify=digits.target, random_state=0
    )
    batches = DataLoader(
        TensorDataset(images[train].to(device), labels[train].to(device)),
        batch_size=BATCH,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(0),
    )
    return batches, [images[test].to(device), labels[test].to(device)]
