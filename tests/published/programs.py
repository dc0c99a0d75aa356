"""Training in the SC22 and SC23 tutorials, restated operation by operation, for comparison with dlscale's curves.

The code does not use dlscale. Like the tutorials, it reads files, computes losses and rates, and updates weights.
Settings are for one process without mixed precision. The networks come from `bench.published`, with the tutorials'
initial weights.

With `repaired`, known defects (`tests/DEFECTS.md`) are repaired; otherwise the code does what the tutorials do.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate

from bench.published import TURNS, Block, Pair, Pieces, UNet, ViT

Batches = Iterable[Sequence[torch.Tensor]]


@dataclass
class Curves:
    """Log of a training: loss and learning rate of each step, mean training and validation losses of each epoch."""

    steps: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    train: list[float] = field(default_factory=list)
    valid: list[float] = field(default_factory=list)


# --- the 3D U-Net (SC22) ----------------------------------------------------------------------------------------


def make_unet(widths: Sequence[int], init_std: float = 0.02) -> UNet:
    """Return the network with weights from N(0, init_std) and biases 0."""
    model = UNet(4, 5, widths)
    for module in model.modules():
        if "Conv" in type(module).__name__:
            nn.init.normal_(module.weight, 0.0, init_std)  # type: ignore[arg-type]
            nn.init.constant_(module.bias, 0.0)  # type: ignore[arg-type]
    return model


@dataclass(frozen=True)
class UNetRate:
    """Learning rate of the U-Net's program.

    Iterations count from 1, so the first rate is already one step down the cosine. The period is the number of all
    steps, so after a warm-up the rate does not reach `end`. If repaired, iterations count from 0 and the period
    excludes the warm-up.
    """

    start: float
    total: int
    batch: int = 64
    base_batch: int = 64
    scaling: str = "none"
    warmup: int = 0
    end: float = 0.0
    repaired: bool = False

    def __call__(self, iteration: int) -> float:
        """Return the rate of an iteration; the first iteration is 1."""
        ratio = self.batch / self.base_batch
        initial = self.start * {"none": 1.0, "sqrt": ratio**0.5, "linear": ratio}[self.scaling]
        warmup = self.warmup if ratio > 1 and self.scaling != "none" else 0
        if self.repaired:
            if iteration <= warmup:
                return initial * iteration / warmup
            part = (iteration - 1 - warmup) / (self.total - warmup)
        else:
            if iteration < warmup:
                return initial * iteration / warmup
            part = (iteration - warmup) / self.total
        return float(self.end + 0.5 * (initial - self.end) * (1 + np.cos(np.pi * part)))


def unet_loss(prediction: torch.Tensor, target: torch.Tensor, lambda_rho: float = 0.0) -> torch.Tensor:
    """Return L1 plus lambda_rho times the L1 of the density, which is exp(14 x) of channel 0.

    The density term is computed for any lambda_rho, including zero.
    """
    density = torch.mean(torch.abs(torch.exp(14.0 * prediction[:, 0]) - torch.exp(14.0 * target[:, 0])))
    return torch.mean(torch.abs(prediction - target)) + lambda_rho * density


def train_unet(
    model: nn.Module,
    train: Callable[[int], Batches],
    valid: Callable[[int], Batches],
    epochs: int,
    rate: UNetRate,
) -> Curves:
    """Train and validate; `train(epoch)` and `valid(epoch)` return batches.

    The order of a step is rate, zeroed gradients, forward, loss, backward, Adam.
    """
    curves, iteration = Curves(), 0
    optimizer = torch.optim.Adam(model.parameters(), lr=rate.start)
    for epoch in range(epochs):
        losses = []
        model.train()
        for x, y in train(epoch):
            iteration += 1
            optimizer.param_groups[0]["lr"] = rate(iteration)
            curves.rates.append(rate(iteration))
            optimizer.zero_grad()
            loss = unet_loss(model(x), y)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
        curves.steps += losses
        curves.train.append(float(np.mean(losses)))
        model.eval()
        with torch.no_grad():
            curves.valid.append(float(np.mean([unet_loss(model(x), y).item() for x, y in valid(epoch)])))
    return curves


def determinant(axes: Sequence[int], signs: Sequence[int]) -> int:
    """Return 1 for a rotation, -1 for a reflection."""
    return round(float(np.linalg.det(np.diag(signs) @ np.eye(3)[list(axes)])))


class Crops(Dataset[Pair]):
    """Random cubes of boxes in memory, turned in one of 24 ways; the tutorial (loader `inmem`) has one box.

    The tutorial's cubes never have the last possible offset. They are turned by 16 rotations and 8 reflections, without
    their vectors. Validation is as random as training. If repaired, all offsets and the 24 rotations occur, and vectors
    are turned, too (channels 1 to 3 of both fields). With `fixed`, the cubes are the disjoint cubes of the first box,
    and are not turned. If given, `last` decides whether the last offset occurs.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        crop: int,
        count: int,
        repaired: bool = False,
        fixed: bool = False,
        last: bool | None = None,
    ) -> None:
        self.boxes = []
        for path in paths:
            with h5py.File(path) as file:
                self.boxes.append([np.asarray(file[name][...], np.float32) for name in ("Nbody", "Hydro")])
        self.crop, self.count, self.repaired, self.fixed = crop, count, repaired, fixed
        self.last = repaired if last is None else last
        rotations = [  # the identity comes first
            (axes, signs)
            for axes in itertools.permutations(range(3))
            for signs in itertools.product((1, -1), repeat=3)
            if determinant(axes, signs) > 0
        ]
        self.turns = rotations if repaired else TURNS

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Pair:
        fields = self.boxes[0 if self.fixed else np.random.randint(len(self.boxes))]
        n, edge = self.crop, fields[0].shape[1]
        if self.fixed:
            start, turn = n * np.array(np.unravel_index(index, (edge // n,) * 3)), self.turns[0]
        else:
            start = np.random.randint(0, edge - n + self.last, size=3)
            turn = self.turns[np.random.randint(len(self.turns))]
        cut = (slice(None), *(slice(first, first + n) for first in start))
        x, y = (torch.from_numpy(np.ascontiguousarray(self._turned(values[cut], *turn))) for values in fields)
        return x, y

    def _turned(self, values: np.ndarray, axes: Sequence[int], signs: Sequence[int]) -> np.ndarray:
        turned = values.transpose(0, *(1 + axis for axis in axes))[:, :: signs[0], :: signs[1], :: signs[2]]
        if self.repaired:
            turned = turned.copy()
            turned[1:4] = turned[[1 + axis for axis in axes]] * np.array(signs, np.float32).reshape(3, 1, 1, 1)
        return turned


# --- the vision transformer (SC23, SC24) ------------------------------------------------------------------------


def make_vit(grid: tuple[int, int], patch: int, channels: int, embed: int, depth: int, heads: int) -> ViT:
    """Return the network with positions and linear weights from N(0, 0.02), truncated at ±2, and biases 0."""
    model = ViT(grid, patch, channels, embed, depth, heads)
    nn.init.trunc_normal_(model.position, std=0.02)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def norms(model: ViT) -> list[nn.LayerNorm]:
    """Return the normalisations of all blocks, without the last normalisation before the head."""
    return [norm for block in model.blocks for norm in (block.norm1, block.norm2)]  # type: ignore[misc]


def shared_vit(
    model: ViT, x: torch.Tensor, y: torch.Tensor, devices: int = 2, repaired: bool = False
) -> tuple[torch.Tensor, list[dict[str, torch.Tensor]]]:
    """Return the prediction and each device's gradients if devices share the tokens of a sample.

    This is the program's context parallelism. Each device has all weights and some of the tokens. Each block gathers
    keys and values. After the last normalisation all tokens are gathered, and every device computes head and loss for
    all tokens. The backward pass of the last gathering gives each device the gradients of its own tokens. Therefore
    each device has complete gradients of the head and partial gradients of all other weights. The program sums most
    partial gradients over the devices.

    The tutorial does not sum the gradients of the last normalisation. Its blocks' normalisations have PyTorch's eps,
    1e-5, but 1e-6 on a single device. If repaired, all partial gradients are summed, and eps is 1e-6.
    """
    ranks = [copy.deepcopy(model) for _ in range(devices)]
    if not repaired:
        for norm in [norm for rank in ranks for norm in norms(rank)]:
            norm.eps = 1e-5
    parts = [
        (rank.embedding(x).flatten(2).transpose(1, 2) + rank.position).tensor_split(devices, dim=1)[number]
        for number, rank in enumerate(ranks)
    ]
    for depth in range(len(model.blocks)):
        parts = _shared_block([rank.blocks[depth] for rank in ranks], parts)  # type: ignore[misc]
    parts = [rank.norm(part) for rank, part in zip(ranks, parts, strict=True)]
    losses = []
    for number, rank in enumerate(ranks):
        tokens = torch.cat([part if other == number else part.detach() for other, part in enumerate(parts)], dim=1)
        prediction = rank.unpatched(rank.head(tokens))
        losses.append(vit_loss(prediction, y))
    torch.stack(losses).sum().backward()
    found: list[dict[str, torch.Tensor]] = [{} for _ in ranks]
    for name, _ in model.named_parameters():
        own = [rank.get_parameter(name).grad for rank in ranks]
        whole = name.startswith("head.") or (name.startswith("norm.") and not repaired)
        for number, gradients in enumerate(found):
            gradients[name] = own[number] if whole else torch.stack(own).sum(dim=0)  # type: ignore[arg-type,assignment]
    return prediction.detach(), found


def _shared_block(blocks: Sequence[Block], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return each device's tokens after a block; each device's queries attend to all devices' keys and values."""
    normed = [block.norm1(part) for block, part in zip(blocks, parts, strict=True)]
    q, k, v = (
        [block.by_head(getattr(block, name)(tokens)) for block, tokens in zip(blocks, normed, strict=True)]
        for name in "qkv"
    )
    keys, values = torch.cat(k, dim=2), torch.cat(v, dim=2)
    after = []
    for block, part, queries in zip(blocks, parts, q, strict=True):
        attended = F.scaled_dot_product_attention(queries, keys, values)
        tokens = part + block.projection(attended.transpose(1, 2).reshape(part.shape))
        after.append(tokens + block.fc2(block.activation(block.fc1(block.norm2(tokens)))))
    return after


def vit_loss(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the relative error, the error's norm over the target's norm, averaged over samples."""
    count = prediction.shape[0]
    error = torch.norm(prediction.reshape(count, -1) - target.reshape(count, -1), 2, 1)
    return torch.mean(error / torch.norm(target.reshape(count, -1), 2, 1))


def u10_rmse(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the latitude-weighted RMSE of each channel [C], averaged over samples.

    Like the program, assume that the rows span both poles and that pi is 3.1416.
    """
    rows = prediction.shape[2]
    cosines = torch.cos(3.1416 / 180.0 * (90.0 - torch.arange(rows) * 180.0 / (rows - 1)))
    weights = (rows * cosines / cosines.sum()).reshape(1, 1, -1, 1)
    return torch.sqrt(torch.mean(weights * (prediction - target) ** 2.0, dim=(-1, -2))).mean(dim=0)


def train_vit(
    model: nn.Module,
    train: Callable[[int], Batches],
    valid: Callable[[int], Batches],
    iterations: int,
    steps_per_epoch: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
) -> Curves:
    """Train complete epochs; the schedule steps after the update.

    The order of a step is zeroed gradients, forward, loss, backward, Adam, schedule.
    """
    curves = Curves()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=betas)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=iterations)
    for epoch in range(iterations // steps_per_epoch):
        losses = []
        model.train()
        for x, y in train(epoch):
            curves.rates.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            loss = vit_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            schedule.step()
        curves.steps += losses
        curves.train.append(float(np.mean(losses)))
        model.eval()
        with torch.inference_mode():
            curves.valid.append(float(np.mean([vit_loss(model(x), y).item() for x, y in valid(epoch)])))
    return curves


class Pairs(Dataset[Pair]):
    """Pairs of standardised states, `dt` apart, from a folder of years.

    The tutorial assumes that all years are as long as the first year, never uses pair 0, and uses pair 1 repeatedly (if
    `dt` is 1). If repaired, every pair is used once.
    """

    def __init__(self, folder: Path, stats: Path, dt: int = 1, repaired: bool = False) -> None:
        self.years = []
        for path in sorted(folder.glob("*.h5")):
            with h5py.File(path) as file:
                self.years.append(np.asarray(file["fields"][...], np.float32))
        self.means, self.stds = (np.load(stats / f"global_{name}.npy")[0] for name in ("means", "stds"))
        self.dt, self.length = dt, len(self.years[0])
        self.each = [(year, row) for year, states in enumerate(self.years) for row in range(len(states) - dt)]
        if not repaired:
            numbers = range(len(self.years) * self.length)
            self.each = [(number // self.length, self._row(number % self.length)) for number in numbers]

    def _row(self, number: int) -> int:
        row = number % (self.length - self.dt)
        return row + self.dt if row < self.dt else row

    def __len__(self) -> int:
        return len(self.each)

    def __getitem__(self, index: int) -> Pair:
        year, row = self.each[index]
        x, y = ((self.years[year][time] - self.means) / self.stds for time in (row, row + self.dt))
        return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.float32))


def shuffled(dataset: Pieces, batch_size: int) -> DataLoader[Pair]:
    """Return PyTorch's loader with the programs' training options, without workers."""
    return DataLoader(dataset, batch_size, shuffle=True, drop_last=True)


def in_order(dataset: Pieces, indices: Sequence[int], batch_size: int) -> list[Sequence[torch.Tensor]]:
    """Return batches of the given samples, in order."""
    items = [dataset[index] for index in indices]
    return [default_collate(items[first : first + batch_size]) for first in range(0, len(items), batch_size)]


def copy_weights(weights: Sequence[torch.Tensor], model: nn.Module) -> None:
    """Copy weights into a model, in the order of the model's parameters."""
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), weights, strict=True):
            parameter.copy_(value)
