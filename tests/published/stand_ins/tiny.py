"""Common code of the stand-ins for the published programs, without dlscale."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

torch.set_num_threads(1)

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

Batches = Iterable[list[torch.Tensor]]


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that each take a millisecond to read."""

    def __init__(self, count: int) -> None:
        self._rows = torch.randn(count, 16, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(1e-3)
        return self._rows[index], self._rows[index, :1] * 2


def loader(count: int, local_batch_size: int) -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
    rows = Rows(count)
    return DataLoader(rows, local_batch_size, sampler=DistributedSampler(rows) if RANKS > 1 else None)


def network() -> nn.Module:
    """Return a network with equal weights in all processes; the processes average their gradients."""
    if RANKS > 1:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(16, 1)
    return nn.parallel.DistributedDataParallel(model) if RANKS > 1 else model


def train(
    model: nn.Module,
    batches: Batches,
    optimizer: torch.optim.Optimizer,
    each: Callable[[int, float], None] = lambda step, loss: None,
) -> tuple[float, float]:
    """Train for an epoch; return the mean loss and the seconds."""
    losses, begin = list[float](), time.perf_counter()
    for step, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        each(step, losses[-1])
    return statistics.fmean(losses), time.perf_counter() - begin


@torch.no_grad()
def validate(model: nn.Module, batches: Batches) -> float:
    return statistics.fmean(nn.functional.mse_loss(model(x), y).item() for x, y in batches)


def note(rate: float, train: float, valid: float) -> None:
    """Append an epoch's rate, by the stand-in's own stopwatch, and its losses to a file next to the stand-in."""
    if RANK == 0:
        with Path(__file__).with_name("stopwatch.jsonl").open("a") as file:
            file.write(json.dumps({"rate": rate, "train": train, "valid": valid}) + "\n")
