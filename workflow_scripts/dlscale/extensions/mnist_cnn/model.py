"""The small convolutional network of PyTorch's MNIST example.

Shape suffixes: B batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

#: Mean and standard deviation of the training images, as fractions of 255.
MEAN, STD = 0.1307, 0.3081


class MnistCNN(nn.Module):
    """Network with two convolutions of 3 x 3, max-pooling and two linear layers; returns log-probabilities."""

    def __init__(
        self,
        image_size: tuple[int, int] = (28, 28),
        channels: int = 1,
        classes: int = 10,
        widths: tuple[int, int] = (32, 64),
        hidden: int = 128,
    ) -> None:
        super().__init__()
        # Arguments: channels in (1 for grey images), channels out (number of filters), edge of a filter in pixels.
        self.conv1 = nn.Conv2d(channels, widths[0], 3)
        self.conv2 = nn.Conv2d(widths[0], widths[1], 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        rows, columns = ((edge - 4) // 2 for edge in image_size)
        self.fc1 = nn.Linear(widths[1] * rows * columns, hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities [B, K] of images with values 0 to 255."""
        x_BCHW = (x_BCHW / 255 - MEAN) / STD
        # The published order, ReLU before pooling, has the same result, but ReLU then takes four times as many values.
        x_BCHW = F.relu(F.max_pool2d(self.conv2(F.relu(self.conv1(x_BCHW))), 2))
        x_BC = self.dropout1(x_BCHW).flatten(1)
        x_BC = self.dropout2(F.relu(self.fc1(x_BC)))
        return F.log_softmax(self.fc2(x_BC), dim=1)


def nll(log_probability_BK: torch.Tensor, label_B: torch.Tensor) -> torch.Tensor:
    """Return the negative log-likelihood of the right class of each sample, [B]; labels are int64."""
    return -log_probability_BK.gather(1, label_B[:, None])[:, 0]
