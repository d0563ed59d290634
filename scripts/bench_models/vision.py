"""Models that see: ResNet, ResNeXt, and a detector."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from bench_models.workload import Workload


class Residual(nn.Module):
    """Two convolutions with batch norm and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, groups=groups, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, groups=groups, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.short(x))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1, as in ResNet-50 (He et al. 2016) and ResNeXt-50 (Xie et al. 2017)."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int, groups: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, groups=groups, bias=False)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.norm3, self.short = nn.BatchNorm2d(outputs), nn.Sequential()
        if stride != 1 or inputs != outputs:
            project = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.short = nn.Sequential(project, nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.short(x))


def stem() -> list[nn.Module]:
    conv = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
    return [conv, nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]


def stage(index: int, groups: int, width: int, stride: int) -> nn.Sequential:
    """One of the four stages of 3, 4, 6 and 3 blocks. `width`: channels per group in the first."""
    inputs, outputs = 64 if index == 0 else 128 << index, 256 << index
    inner = groups * width << index
    count = (3, 4, 6, 3)[index]
    return nn.Sequential(
        Bottleneck(inputs, inner, outputs, stride, groups),
        *(Bottleneck(outputs, inner, outputs, 1, groups) for _ in range(count - 1)),
    )


def resnet50(groups: int = 1, width: int = 64) -> nn.Sequential:
    stages = [stage(i, groups, width, 1 if i == 0 else 2) for i in range(4)]
    return nn.Sequential(*stem(), *stages, *_head(2048, 1000))


def resnet(device: str, large: bool) -> Workload:
    return _classifier(device, large, resnet50() if large else _small_resnet(1))


def resnext(device: str, large: bool) -> Workload:
    return _classifier(device, large, resnet50(32, 4) if large else _small_resnet(8))


def _small_resnet(groups: int) -> nn.Sequential:
    blocks = [
        Residual(32, 32, 1, groups),
        Residual(32, 64, 2, groups),
        Residual(64, 128, 2, groups),
    ]
    return nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1), *blocks, *_head(128, 10))


def _head(width: int, classes: int) -> tuple[nn.Module, ...]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)


def _classifier(device: str, large: bool, model: nn.Module) -> Workload:
    batch, side, classes = (128, 224, 1000) if large else (16, 32, 10)
    x = torch.randn(batch, 3, side, side, device=device)
    y = torch.randint(0, classes, (batch,), device=device)
    if large:  # as it is trained on GPUs
        x = x.to(memory_format=torch.channels_last)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch 2.13
    return Workload(model, lambda m: F.cross_entropy(m(x), y))


class SSD(nn.Module):
    """Boxes and classes at several scales (Liu et al. 2016), on a residual backbone."""

    def __init__(self, backbone: nn.Module, width: int, extra: int, classes: int, anchors: int):
        super().__init__()
        self.backbone, self.classes = backbone, classes
        narrow = width // 4
        self.extra = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, narrow, 1, bias=False),
                nn.BatchNorm2d(narrow),
                nn.ReLU(),
                nn.Conv2d(narrow, width, 3, 2, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            )
            for _ in range(extra)
        )
        heads = range(extra + 1)
        self.boxes = nn.ModuleList(nn.Conv2d(width, 4 * anchors, 3, 1, 1) for _ in heads)
        self.kinds = nn.ModuleList(nn.Conv2d(width, classes * anchors, 3, 1, 1) for _ in heads)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        maps = [self.backbone(x)]
        for layer in self.extra:
            maps.append(layer(maps[-1]))
        boxes = [_flat(head(m), 4) for head, m in zip(self.boxes, maps, strict=True)]
        kinds = [_flat(head(m), self.classes) for head, m in zip(self.kinds, maps, strict=True)]
        return torch.cat(boxes, 1), torch.cat(kinds, 1)


def _flat(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, size)


def ssd(device: str, large: bool) -> Workload:
    batch, side, classes = (32, 300, 81) if large else (4, 64, 11)
    if large:  # ResNet-50 up to its third stage, which keeps its size
        stages = [stage(0, 1, 64, 1), stage(1, 1, 64, 2), stage(2, 1, 64, 1)]
        model = SSD(nn.Sequential(*stem(), *stages), 1024, 5, classes, 6)
    else:
        model = SSD(nn.Sequential(Residual(3, 32, 2), Residual(32, 64, 2)), 64, 2, classes, 4)
    x = torch.randn(batch, 3, side, side, device=device)
    with torch.no_grad():
        count = model.eval()(x[:1])[0].shape[1]
    boxes = torch.randn(batch, count, 4, device=device)
    kinds = torch.randint(0, classes, (batch, count), device=device)

    def loss(m: nn.Module) -> torch.Tensor:
        found_boxes, found_kinds = m(x)
        of_kinds = F.cross_entropy(found_kinds.flatten(0, 1), kinds.flatten())
        return of_kinds + F.smooth_l1_loss(found_boxes, boxes)

    return Workload(model.train(), loss)
