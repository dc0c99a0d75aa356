"""An external program: a training without dlscale, in which a bottleneck can be planted."""

from __future__ import annotations

import argparse
import mmap
import os
import time
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset

#: Bytes per read of the file or of the table.
BLOCK = 2**16

parser = argparse.ArgumentParser()
parser.add_argument("--seconds", type=float, default=6.0, help="seconds of training (default: 6)")
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--size", type=int, default=768, help="width of each layer (default: 768)")
parser.add_argument("--depth", type=int, default=4)
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--decode", type=float, default=0.0, help="processor seconds per sample (default: 0)")
parser.add_argument("--read", type=float, default=0.0, help="seconds that each sample waits for a disk (default: 0)")
parser.add_argument("--nap", type=float, default=0.0, help="seconds that each step sleeps (default: 0)")
parser.add_argument("--item", action="store_true", help="read a number from the device after every layer")
parser.add_argument("--validation", type=int, default=0, help="batches of validation after every 20 steps (default: 0)")
parser.add_argument("--slow", choices=("computing", "loading"), help="work that takes longer on the last rank")
parser.add_argument("--table", type=int, default=0, help="bytes of the table that samples read at random (default: 0)")


class Samples(Dataset[Any]):
    """Random samples whose reading can be slowed."""

    def __init__(self, args: argparse.Namespace, last: bool) -> None:
        slow = last and args.slow == "loading"
        self.decode, self.read = args.decode + 2e-3 * slow, args.read
        self.table = np.ones(args.table, np.uint8)

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        end = time.thread_time() + self.decode
        while time.thread_time() < end:
            sum(range(1000))
        if self.read:
            with mmap.mmap(-1, BLOCK) as memory:  # read with a system call, which the kernel's I/O counters count
                file = os.open(__file__, os.O_RDONLY)
                os.preadv(file, [memory], 0)
                os.close(file)
            time.sleep(self.read)
        for place in np.random.randint(0, len(self.table) - BLOCK, 4) if len(self.table) else ():
            self.table[place : place + BLOCK : 4096].sum()
        return torch.randn(64)


def read(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    """Make the host wait for the output of a layer."""
    if output.detach().mean().item() > 1e9:
        raise RuntimeError("never")


def main() -> None:
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    layers = [layer for _ in range(args.depth) for layer in (nn.Linear(args.size, args.size), nn.ReLU())]
    model: nn.Module = nn.Sequential(nn.Linear(64, args.size), *layers, nn.Linear(args.size, 1))
    if args.item:
        for layer in layers:
            layer.register_forward_hook(read)
    if ranks > 1:
        distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    last = ranks > 1 and rank == ranks - 1
    loader = DataLoader(Samples(args, last), batch_size=args.batch, num_workers=args.workers)
    valid = DataLoader(Samples(args, last), batch_size=args.batch)
    begin, number, goes_on, counted = time.perf_counter(), 0, True, (0, 0.0)
    while goes_on:
        for x in loader:
            model(x).square().mean().backward()
            for _ in range(4 * (last and args.slow == "computing")):
                with torch.no_grad():
                    model(x)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(args.nap)
            number += 1
            if number == 20:
                counted = number, time.perf_counter()
            if number % 20 == 0:
                with torch.no_grad():
                    for _, y in zip(range(args.validation), valid, strict=False):
                        model(y)
                still = torch.tensor(float(time.perf_counter() - begin < args.seconds))
                if ranks > 1:
                    distributed.broadcast(still, 0)
                if not (goes_on := bool(still)):
                    break
    if not rank and number > counted[0]:  # samples/s by the program's own clock, validation included
        rate = ranks * args.batch * (number - counted[0]) / (time.perf_counter() - counted[1])
        print(f"avg {rate:.1f} samples/sec")


if __name__ == "__main__":
    main()
