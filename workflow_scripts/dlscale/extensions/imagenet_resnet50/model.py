"""Residual networks of He et al. 2016 (arXiv:1512.03385), with torchvision's architecture and parameter names.

Shape suffixes: B batch, C channels, H W the image, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

#: Mean and standard deviation of red, green and blue in ImageNet's training images, as fractions of 255.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
#: Number of layers → number of blocks in each of the four stages, and whether the blocks are bottlenecks.
DEPTHS = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
}


class BasicBlock(nn.Module):
    """Two convolutions of 3 x 3 and a shortcut, which is a convolution if the shape changes."""

    expansion = 1

    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(inner, width * self.expansion, stride)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Return [B, width, H/stride, W/stride]."""
        y_BCHW = self.relu(self.bn1(self.conv1(x_BCHW)))
        y_BCHW = self.bn2(self.conv2(y_BCHW))
        y_BCHW += x_BCHW if self.downsample is None else self.downsample(x_BCHW)
        return self.relu(y_BCHW)


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1, and a shortcut, which is a convolution if the shape changes.

    The second convolution has the stride ("ResNet v1.5"), as in torchvision.
    """

    expansion = 4

    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(inner, width * self.expansion, stride)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Return [B, 4 width, H/stride, W/stride]."""
        y_BCHW = self.relu(self.bn1(self.conv1(x_BCHW)))
        y_BCHW = self.relu(self.bn2(self.conv2(y_BCHW)))
        y_BCHW = self.bn3(self.conv3(y_BCHW))
        y_BCHW += x_BCHW if self.downsample is None else self.downsample(x_BCHW)
        return self.relu(y_BCHW)


def _shortcut(inner: int, outer: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inner == outer:
        return None
    return nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))


class ResNet(nn.Module):
    """Residual network with `depth` 18, 34, 50 or 101; the four stages have 1, 2, 4 and 8 times `width` channels.

    `mean` and `std`, as fractions of 255 (such as 0.485), normalise images with values 0 to 255; None if images
    are already normalised. With bottlenecks the outputs of the stages have four times as many channels.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(
        self,
        depth: int = 50,
        classes: int = 1000,
        channels: int = 3,
        width: int = 64,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.normalises = mean is not None and std is not None
        for name, values in (("mean", mean or [0.0]), ("std", std or [1.0])):
            self.register_buffer(name, 255 * torch.tensor(values).reshape(-1, 1, 1), persistent=False)
        blocks, bottleneck = DEPTHS[depth]
        block = Bottleneck if bottleneck else BasicBlock
        self.conv1 = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        inner = width
        for number, count in enumerate(blocks):
            outer = width * 2**number
            stage = nn.Sequential()
            for position in range(count):
                stage.append(block(inner, outer, stride=2 if number and not position else 1))
                inner = outer * block.expansion
            self.add_module(f"layer{number + 1}", stage)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inner, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Return logits [B, K] of images."""
        if self.normalises:
            x_BCHW = (x_BCHW - self.mean) / self.std
        x_BCHW = self.maxpool(self.relu(self.bn1(self.conv1(x_BCHW))))
        for number in range(1, 5):
            x_BCHW = getattr(self, f"layer{number}")(x_BCHW)
        return self.fc(self.avgpool(x_BCHW).flatten(1))


def cross_entropy(logits_BK: torch.Tensor, label_B: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each sample, [B], in nats; labels are int64."""
    return F.cross_entropy(logits_BK, label_B, reduction="none")
