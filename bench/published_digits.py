"""Plain restatement of PyTorch's MNIST example, as a reference for the study `mnist_cnn`.

torchvision's dataset and transforms are restated operation by operation, so torchvision is not needed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

Sample = tuple[torch.Tensor, int]


class Digits(Dataset[Sample]):
    """torchvision's MNIST with ToTensor and Normalize: images uint8 [N, 28, 28] and labels [N] in memory."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.data, self.targets = images, labels

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Sample:
        pixels, target = self.data[index], int(self.targets[index])
        image = Image.fromarray(pixels.numpy())
        return normalized(to_tensor(image), (0.1307,), (0.3081,)), target


def to_tensor(image: Image.Image) -> torch.Tensor:
    """Convert an image of bytes to float32 [C, H, W] from 0 to 1, like torchvision's `to_tensor`."""
    values = torch.from_numpy(np.array(image, np.uint8, copy=True))
    values = values.view(image.size[1], image.size[0], len(image.getbands()))
    return values.permute((2, 0, 1)).contiguous().to(dtype=torch.get_default_dtype()).div(255)


def normalized(values: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Normalise each channel like torchvision's `normalize`."""
    values = values.clone()
    means = torch.as_tensor(mean, dtype=values.dtype, device=values.device)
    stds = torch.as_tensor(std, dtype=values.dtype, device=values.device)
    if (stds == 0).any():
        raise ValueError("division by zero")
    return values.sub_(means.view(-1, 1, 1)).div_(stds.view(-1, 1, 1))


class Net(nn.Module):
    """The example's network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = torch.flatten(x, 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


class Program:
    """The example: Adadelta with learning rate 1, times 0.7 after each epoch; batches of 64 from one loader process.

    The lines that the example would print are appended to `printed`.
    """

    def __init__(self, train: Dataset[Sample], test: Dataset[Sample], workers: int = 1) -> None:
        torch.manual_seed(1)
        self.device = torch.device("cpu")
        self.train_loader = DataLoader(train, batch_size=64, shuffle=True, num_workers=workers)
        self.test_loader = DataLoader(test, batch_size=1000)
        self.model = Net().to(self.device)
        self.optimizer = optim.Adadelta(self.model.parameters(), lr=1.0)
        self.scheduler = StepLR(self.optimizer, step_size=1, gamma=0.7)
        self.printed: list[str] = []

    def epoch(self, epoch: int) -> float:
        """Train for an epoch; return the seconds of the training loop."""
        start = time.perf_counter()
        self.model.train()
        for batch, (data, target) in enumerate(self.train_loader):
            data, target = data.to(self.device), target.to(self.device)
            self.optimizer.zero_grad()
            output = self.model(data)
            loss = F.nll_loss(output, target)
            loss.backward()
            self.optimizer.step()
            if batch % 10 == 0:
                self.printed.append(f"Train Epoch: {epoch} [{batch * len(data)}]\tLoss: {loss.item():.6f}")
        seconds = time.perf_counter() - start
        self.scheduler.step()
        return seconds

    def accuracy(self) -> float:
        """Return the fraction of correct answers on the test images."""
        self.model.eval()
        right = 0
        with torch.no_grad():
            for data, target in self.test_loader:
                prediction = self.model(data.to(self.device)).argmax(dim=1, keepdim=True)
                right += int(prediction.eq(target.view_as(prediction)).sum().item())
        return right / len(self.test_loader.dataset)  # type: ignore[arg-type]
