"""Plain restatements of the tutorials' loaders, models and step, as references.

Parameters have the order of dlscale's models, so weights can be copied from one to the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:  # `make bench-gpu` loads no photographs and works without Pillow
    from PIL import Image

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]
Pieces = Dataset[Pair]


class UNet(nn.Module):
    """U-Net: convolutions of stride 2 down, transposed convolutions up; each level's skip is concatenated."""

    def __init__(self, in_channels: int, out_channels: int, widths: Sequence[int]) -> None:
        super().__init__()
        down = [in_channels, *widths]
        self.down = nn.ModuleList(nn.Conv3d(a, b, 4, 2, 1) for a, b in zip(down, widths, strict=False))
        up, width = [], widths[-1]
        for above in reversed(widths[:-1]):
            up.append(nn.ConvTranspose3d(width, above, 4, 2, 1))
            width = 2 * above
        self.up = nn.ModuleList(up)
        self.last = nn.ConvTranspose3d(width, out_channels, 4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for conv in self.down:
            x = F.leaky_relu(conv(x), 0.01)
            skips.append(x)
        x = skips.pop()
        for conv in self.up:
            x = torch.cat((F.relu(conv(x)), skips.pop()), dim=1)
        return torch.tanh(self.last(x))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, embed: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(embed, eps=1e-6)
        self.q, self.k, self.v, self.projection = (nn.Linear(embed, embed) for _ in range(4))
        self.norm2 = nn.LayerNorm(embed, eps=1e-6)
        self.fc1, self.fc2 = nn.Linear(embed, 4 * embed), nn.Linear(4 * embed, embed)
        self.dropout, self.activation = nn.Dropout(0.0), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, tokens, embed = x.shape
        normed = self.norm1(x)
        q, k, v = (self.by_head(layer(normed)) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v)
        attended = attended.transpose(1, 2).reshape(count, tokens, embed)
        x = x + self.dropout(self.projection(attended))
        hidden = self.dropout(self.activation(self.fc1(self.norm2(x))))
        return x + self.dropout(self.fc2(hidden))

    def by_head(self, x: torch.Tensor) -> torch.Tensor:
        """Reshape [B, N, E] to [B, heads, N, E / heads]."""
        count, tokens, embed = x.shape
        return x.reshape(count, tokens, self.heads, embed // self.heads).permute(0, 2, 1, 3)


class ViT(nn.Module):
    """Vision transformer: patches to tokens, transformer blocks, and a linear head back to patches."""

    def __init__(self, grid: tuple[int, int], patch: int, channels: int, embed: int, depth: int, heads: int) -> None:
        super().__init__()
        self.patch, self.channels = patch, channels
        self.tokens = grid[0] // patch, grid[1] // patch
        self.position = nn.Parameter(torch.zeros(1, self.tokens[0] * self.tokens[1], embed))
        self.embedding = nn.Conv2d(channels, embed, patch, patch)
        self.blocks = nn.ModuleList(Block(embed, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(embed, eps=1e-6)
        self.head = nn.Linear(embed, channels * patch**2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return self.unpatched(self.head(self.norm(x)))

    def unpatched(self, x: torch.Tensor) -> torch.Tensor:
        """Return fields [B, C, H, W] from tokens; each token holds the values of one patch."""
        (rows, columns), patch = self.tokens, self.patch
        x = x.reshape(len(x), rows, columns, patch, patch, self.channels)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(len(x), self.channels, rows * patch, columns * patch)


def l1(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean absolute error."""
    return torch.mean(torch.abs(prediction - target))


def relative_l2(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the norm of the error over the norm of the target, averaged over samples."""
    count = len(prediction)
    error = torch.norm(prediction.reshape(count, -1) - target.reshape(count, -1), 2, 1)
    return torch.mean(error / torch.norm(target.reshape(count, -1), 2, 1))


def step(model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    """Return one step of the tutorials' loop: set the learning rate, compute gradients, update the weights."""

    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = 1e-4
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        return value.detach()

    return call


#: Turns of a cube in SC22's program, in its order: 24 pairs (axes, signs). The axes are permuted, then the axes of sign
#: -1 are reversed. The program calls all turns rotations, but 8 are reflections: every second turn with two
#: swapped axes, and the last turn of each of the two cyclic orders.
TURNS: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    (tuple(map(int, axes)), tuple(-1 if str(axis) in mirrored else 1 for axis in range(3)))
    for axes, each in (
        ("012", "01 02 12"),
        ("102", "0 02 1 12"),
        ("210", "0 01 2 12"),
        ("021", "1 01 2 02"),
        ("120", "01 12 02 012"),
        ("201", "01 02 12 012"),
        ("012", "-"),
    )
    for mirrored in each.split()
]


class Crops(Dataset[Pair]):
    """Random cubes of two fields: read into a reused buffer, turned as views, and copied once.

    Like SC22's loader for HDF5 files, this dataset turns both fields alike but does not turn the velocity vectors.
    """

    def __init__(self, path: Path, crop: int, count: int) -> None:
        self.path, self.crop, self.count = path, crop, count
        self.fields: list[tuple[h5py.Dataset, np.ndarray]] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Pair:
        if not self.fields:
            file = h5py.File(self.path, "r")
            shape = (self.crop,) * 3
            self.fields = [(f, np.zeros((len(f), *shape), np.float32)) for f in (file["Nbody"], file["Hydro"])]
        edge = self.fields[0][0].shape[1]
        z, y, x = np.random.randint(edge - self.crop, size=3)
        axes, flips = TURNS[np.random.randint(len(TURNS))]
        tensors = []
        for field, buffer in self.fields:
            n = self.crop
            field.read_direct(buffer, np.s_[:, z : z + n, y : y + n, x : x + n], np.s_[:])
            turned = buffer.transpose(0, *(1 + axis for axis in axes))[:, :: flips[0], :: flips[1], :: flips[2]]
            tensors.append(torch.as_tensor(np.copy(turned)))
        return tensors[0], tensors[1]


class Pairs(Dataset[Pair]):
    """Pairs of consecutive states of a series, standardised in place."""

    def __init__(self, path: Path, means: np.ndarray, stds: np.ndarray, count: int) -> None:
        self.path, self.means, self.stds, self.count = path, means, stds, count
        self.states: h5py.Dataset | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Pair:
        if self.states is None:
            self.states = h5py.File(self.path, "r")["fields"]
        return self._state(index), self._state(index + 1)

    def _state(self, time: int) -> torch.Tensor:
        assert self.states is not None
        values = self.states[time, :, :360]
        values -= self.means
        values /= self.stds
        return torch.as_tensor(values)


def loader(dataset: Pieces, batch_size: int, workers: int) -> DataLoader[Pair]:
    """Return PyTorch's DataLoader with the tutorials' options."""
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(),
    )


#: Mean and standard deviation of red, green and blue, as fractions of 255.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Photographs(Dataset["tuple[Image.Image, int]"]):
    """Image folders, read as by torchvision's `ImageFolder`, `RandomResizedCrop` and `RandomHorizontalFlip`.

    Random numbers are drawn from torch one at a time, as in torchvision.
    """

    def __init__(self, folder: Path, size: int) -> None:
        classes = sorted(path.name for path in folder.iterdir())
        self.size = size
        self.files = [(path, label) for label, name in enumerate(classes) for path in sorted((folder / name).iterdir())]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        from PIL import Image

        path, label = self.files[index]
        with open(path, "rb") as file:
            return self.augmented(Image.open(file).convert("RGB")), label

    def augmented(self, image: Image.Image) -> Image.Image:
        """Return a random crop of an image, resized, and mirrored at random."""
        from PIL import Image

        top, left, height, width = self._crop(*image.size)
        image = image.crop((left, top, left + width, top + height))
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if torch.rand(1) < 0.5 else image

    def _crop(self, width: int, height: int) -> tuple[int, int, int, int]:
        logs = torch.log(torch.tensor((3 / 4, 4 / 3)))
        for _ in range(10):
            area = width * height * torch.empty(1).uniform_(0.08, 1.0).item()
            shape = torch.exp(torch.empty(1).uniform_(logs[0].item(), logs[1].item())).item()
            columns, rows = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
            if 0 < columns <= width and 0 < rows <= height:
                top = int(torch.randint(0, height - rows + 1, (1,)).item())
                return top, int(torch.randint(0, width - columns + 1, (1,)).item()), rows, columns
        edge = min(width, height)
        return (height - edge) // 2, (width - edge) // 2, edge, edge


def fast_collate(batch: list[tuple[Image.Image, int]]) -> Pair:
    """Collate images to uint8 [B, C, H, W]; each image is added to zeros, as in Apex's example."""
    labels = torch.tensor([label for _, label in batch], dtype=torch.int64)
    width, height = batch[0][0].size
    images = torch.zeros((len(batch), 3, height, width), dtype=torch.uint8)
    for number, (image, _) in enumerate(batch):
        images[number] += torch.from_numpy(np.rollaxis(np.array(image, dtype=np.uint8), 2))
    return images, labels


def image_loader(folder: Path, size: int, batch_size: int, workers: int) -> DataLoader[Pair]:
    """Return the loader of Apex's ImageNet example, which the ImageNet tutorial uses."""
    return DataLoader(
        Photographs(folder, size),  # type: ignore[arg-type]
        batch_size=batch_size,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=fast_collate,
        pin_memory=torch.cuda.is_available(),
    )


def dali_pipeline(folder: Path, size: int, batch_size: int, threads: int) -> Any:
    """Build the pipeline of DALI's ResNet-50 example on the CPU."""
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=batch_size, num_threads=threads, device_id=None, seed=12)
    def pipeline() -> Any:
        files, labels = fn.readers.file(file_root=str(folder), random_shuffle=True, pad_last_batch=True, name="Reader")
        images = fn.decoders.image_random_crop(
            files,
            device="cpu",
            output_type=types.RGB,
            random_aspect_ratio=[0.8, 1.25],
            random_area=[0.1, 1.0],
            num_attempts=100,
        )
        images = fn.resize(images, resize_x=size, resize_y=size, interp_type=types.INTERP_TRIANGULAR)
        images = fn.crop_mirror_normalize(
            images,
            dtype=types.FLOAT,
            output_layout="CHW",
            crop=(size, size),
            mean=[255 * value for value in MEAN],
            std=[255 * value for value in STD],
            mirror=fn.random.coin_flip(probability=0.5),
        )
        return images, labels

    built = pipeline()
    built.build()
    return built
